"""A save is all or nothing: at every instant its name means the old checkpoint or the new one."""

from __future__ import annotations

import errno
import multiprocessing
import os
import random
import stat
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ckpt_engine.errors import ConfigError, SaveFailedError
from ckpt_engine.image.manifest import FileRecord, Manifest
from ckpt_engine.restore.integrity import read_manifest, resolve, verify
from ckpt_engine.storage.backend import backend_for, join
from ckpt_engine.storage.cleanup import remove_checkpoint, sweep_incomplete
from ckpt_engine.storage.exchange import exchange_names
from ckpt_engine.storage.transaction import Transaction

IMAGE = "rank-00000.safetensors"
TREE = "rank-00000.json"


def no_exchange(first: str, second: str) -> None:
    """What a kernel or file system without RENAME_EXCHANGE answers."""
    raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), first, None, second)


def manifest_of(step: int, files: tuple[FileRecord, ...]) -> Manifest:
    return Manifest(
        version=1,
        save_id=uuid.uuid4().hex,
        step=step,
        created=float(step),
        world_size=1,
        files=files,
        tensors=(),
        window={},
        audit={},
        meta={},
    )


def content(step: int, size: int = 50_000) -> bytes:
    return random.Random(step).randbytes(size)


def save(
    destination: str, step: int, *, exchange: Callable[[str, str], None] = exchange_names, size: int = 50_000
) -> tuple[FileRecord, ...]:
    """A checkpoint of an image and a tree, both made from ``step``."""
    with Transaction(destination, save_id=uuid.uuid4().hex, exchange=exchange) as transaction:
        files = (
            transaction.write_image(IMAGE, memoryview(content(step, size)), chunk_bytes=16384),
            transaction.write_bytes(TREE, str(step).encode()),
        )
        transaction.commit(manifest_of(step, files))
    return files


def step_of(destination: str) -> int:
    """The step of a checkpoint whose every byte is what that step wrote."""
    assert verify(destination) == []
    manifest, where = read_manifest(destination), resolve(destination)
    backend = backend_for(destination)
    assert backend.read_bytes(join(where, TREE)) == str(manifest.step).encode()
    size = next(record.size for record in manifest.files if record.name == IMAGE)
    assert backend.read_bytes(join(where, IMAGE)) == content(manifest.step, size)
    return manifest.step


@pytest.fixture(params=["local", "url", "remote"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    url = {
        "local": str(tmp_path / "run"),
        "url": f"file://{tmp_path}/run",
        "remote": f"memory://{uuid.uuid4().hex}/run",
    }[request.param]
    yield url
    backend_for(url).remove_tree(url)


def test_a_commit_is_complete_and_leaves_nothing_beside_it(root: str) -> None:
    save(join(root, "a.ckpt"), 7)
    assert step_of(join(root, "a.ckpt")) == 7
    assert backend_for(root).listdir(root) == ["a.ckpt"]
    assert backend_for(root).listdir(join(root, "a.ckpt")) == ["manifest.json", TREE, IMAGE]


def test_an_existing_checkpoint_is_replaced_as_a_whole(root: str) -> None:
    save(join(root, "a.ckpt"), 1, size=90_000)
    save(join(root, "a.ckpt"), 2)
    assert step_of(join(root, "a.ckpt")) == 2
    assert backend_for(root).listdir(root) == ["a.ckpt"]


def test_the_old_checkpoint_is_whole_until_the_commit(root: str) -> None:
    save(join(root, "a.ckpt"), 1)
    with Transaction(join(root, "a.ckpt"), save_id="x") as transaction:
        assert step_of(join(root, "a.ckpt")) == 1
        files = (
            transaction.write_image(IMAGE, memoryview(content(2)), chunk_bytes=16384),
            transaction.write_bytes(TREE, b"2"),
        )
        assert step_of(join(root, "a.ckpt")) == 1
        transaction.commit(manifest_of(2, files))
        assert step_of(join(root, "a.ckpt")) == 2


def test_an_abort_leaves_what_was_there(root: str) -> None:
    save(join(root, "a.ckpt"), 1)
    with Transaction(join(root, "a.ckpt"), save_id="x") as transaction:
        transaction.write_image(IMAGE, memoryview(content(2)))
    with pytest.raises(KeyboardInterrupt):
        _interrupted_save(join(root, "b.ckpt"))
    assert step_of(join(root, "a.ckpt")) == 1
    assert backend_for(root).listdir(root) == ["a.ckpt"]


def _interrupted_save(destination: str) -> None:
    with Transaction(destination, save_id="y") as transaction:
        transaction.write_image(IMAGE, memoryview(content(2)))
        raise KeyboardInterrupt


def test_a_plain_file_of_that_name_is_replaced_and_kept_on_abort(root: str) -> None:
    backend = backend_for(root)
    backend.makedirs(root)
    backend.write_bytes(join(root, "a.ckpt"), b"vanilla")
    with Transaction(join(root, "a.ckpt"), save_id="x") as transaction:
        transaction.write_bytes(TREE, b"1")
    assert backend.read_bytes(join(root, "a.ckpt")) == b"vanilla"
    save(join(root, "a.ckpt"), 3)
    assert step_of(join(root, "a.ckpt")) == 3
    assert backend.listdir(root) == ["a.ckpt"]


def test_a_symbolic_link_is_replaced_and_its_checkpoint_kept(tmp_path: Path) -> None:
    save(str(tmp_path / "a.ckpt"), 1)
    (tmp_path / "last.ckpt").symlink_to("a.ckpt")
    save(str(tmp_path / "last.ckpt"), 2)
    assert (step_of(str(tmp_path / "a.ckpt")), step_of(str(tmp_path / "last.ckpt"))) == (1, 2)
    assert not (tmp_path / "last.ckpt").is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.ckpt", "last.ckpt"]


@pytest.mark.parametrize("kind", ["checkpoint", "file", "link", "nothing"])
def test_without_atomic_exchange_the_old_one_steps_aside(tmp_path: Path, kind: str) -> None:
    target = tmp_path / "a.ckpt"
    if kind == "checkpoint":
        save(str(target), 1)
    elif kind == "file":
        target.write_bytes(b"vanilla")
    elif kind == "link":
        target.symlink_to("elsewhere")
    save(str(target), 2, exchange=no_exchange)
    assert step_of(str(target)) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["a.ckpt"]


def test_a_reader_finds_the_old_one_while_it_is_aside(tmp_path: Path) -> None:
    save(str(tmp_path / "a.ckpt"), 1)
    (tmp_path / "a.ckpt").rename(tmp_path / ".a.ckpt.replaced-x")
    assert step_of(str(tmp_path / "a.ckpt")) == 1
    save(str(tmp_path / "a.ckpt"), 2)
    assert step_of(str(tmp_path / "a.ckpt")) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["a.ckpt"]


def test_a_failed_rename_puts_the_old_one_back(tmp_path: Path) -> None:
    save(str(tmp_path / "a.ckpt"), 1)

    def lose_staging(first: str, second: str) -> None:
        os.rename(first, f"{first}-lost")
        no_exchange(first, second)

    with pytest.raises(SaveFailedError):
        save(str(tmp_path / "a.ckpt"), 2, exchange=lose_staging)
    assert step_of(str(tmp_path / "a.ckpt")) == 1
    assert (tmp_path / "a.ckpt").is_dir()


def test_a_linked_image_shares_its_bytes_and_outlives_its_source(tmp_path: Path) -> None:
    files = save(str(tmp_path / "a.ckpt"), 5)
    with Transaction(str(tmp_path / "b.ckpt"), save_id="x") as transaction:
        image = transaction.link_image(IMAGE, str(tmp_path / "a.ckpt"), files[0])
        tree = transaction.link_image(TREE, str(tmp_path / "a.ckpt"), files[1])
        transaction.commit(manifest_of(5, (image, tree)))
    assert os.path.samefile(tmp_path / "a.ckpt" / IMAGE, tmp_path / "b.ckpt" / IMAGE)
    save(str(tmp_path / "a.ckpt"), 6)
    assert (step_of(str(tmp_path / "a.ckpt")), step_of(str(tmp_path / "b.ckpt"))) == (6, 5)
    remove_checkpoint(str(tmp_path / "a.ckpt"))
    assert step_of(str(tmp_path / "b.ckpt")) == 5


def test_where_no_link_is_possible_the_image_is_copied(tmp_path: Path) -> None:
    files = save(str(tmp_path / "a.ckpt"), 5)
    remote = f"memory://{uuid.uuid4().hex}/b.ckpt"
    for source, target in (
        (str(tmp_path / "a.ckpt"), f"/dev/shm/{uuid.uuid4().hex}.ckpt"),
        (str(tmp_path / "a.ckpt"), remote),
        (remote, str(tmp_path / "c.ckpt")),
    ):
        with Transaction(target, save_id="x") as transaction:
            copies = tuple(transaction.link_image(record.name, source, record) for record in files)
            transaction.commit(manifest_of(5, copies))
        assert step_of(target) == 5
        if target != remote:
            remove_checkpoint(target)


@pytest.mark.parametrize("damage", ["missing", "short", "flipped"])
def test_a_damaged_image_is_not_taken_over(tmp_path: Path, damage: str) -> None:
    files = save(str(tmp_path / "a.ckpt"), 5)
    path = tmp_path / "a.ckpt" / IMAGE
    data = bytearray(path.read_bytes())
    path.unlink()
    data[100] ^= 1
    if damage != "missing":
        path.write_bytes(data if damage == "flipped" else data[:-1])
    # Copied, not linked: another file system is the case in which the content can be checked.
    target = f"memory://{uuid.uuid4().hex}/b.ckpt"
    with Transaction(target, save_id="x") as transaction, pytest.raises(SaveFailedError):
        transaction.link_image(IMAGE, str(tmp_path / "a.ckpt"), files[0])
    assert not backend_for(target).exists(join(target, "manifest.json"))


def test_the_manifest_must_describe_what_was_written(tmp_path: Path) -> None:
    destination = str(tmp_path / "a.ckpt")
    with Transaction(destination, save_id="x") as transaction:
        image = transaction.write_image(IMAGE, memoryview(content(1)))
        tree = transaction.write_bytes(TREE, b"1")
        other = FileRecord(name=TREE, size=1, chunk_bytes=tree.chunk_bytes, digests=("0" * 16,))
        absent = FileRecord(name="rank-00001.json", size=1, chunk_bytes=tree.chunk_bytes, digests=tree.digests)
        for files in ((image,), (image, other), (image, tree, absent)):
            with pytest.raises(SaveFailedError):
                transaction.commit(manifest_of(1, files))
    assert list(tmp_path.iterdir()) == []


def test_misuse_is_refused_with_a_sentence(tmp_path: Path) -> None:
    destination = str(tmp_path / "a.ckpt")
    for bad in ("", "/", "..", f"{tmp_path}/."):
        with pytest.raises(ConfigError):
            Transaction(bad, save_id="x")
    with pytest.raises(ConfigError, match="save_id"):
        Transaction(destination, save_id="a/b")
    with pytest.raises(ConfigError, match="is new"):
        Transaction(destination, save_id="x").write_bytes(TREE, b"")
    with Transaction(destination, save_id="x") as transaction:
        transaction.write_bytes(TREE, b"1")
        for name in ("", "../x", "a/b", "..", ".hidden", "manifest.json", "owner.json", TREE, "a\0b"):
            with pytest.raises(ConfigError):
                transaction.write_bytes(name, b"")
    with pytest.raises(ConfigError, match="aborted"):
        transaction.begin()


def test_the_same_save_twice_at_once_is_refused_and_the_first_goes_on(tmp_path: Path) -> None:
    destination = str(tmp_path / "a.ckpt")
    with Transaction(destination, save_id="x") as transaction:
        files = (transaction.write_image(IMAGE, memoryview(content(1))), transaction.write_bytes(TREE, b"1"))
        second = Transaction(destination, save_id="x")
        with pytest.raises(SaveFailedError, match="another save"):
            second.begin()
        second.abort()
        transaction.commit(manifest_of(1, files))
    assert step_of(destination) == 1


def test_what_a_dead_process_left_under_the_same_id_is_no_obstacle(tmp_path: Path) -> None:
    staging = tmp_path / ".a.ckpt.incomplete-x"
    staging.mkdir()
    (staging / IMAGE).write_bytes(b"half")
    os.utime(staging / IMAGE, (1, 1))
    os.utime(staging, (1, 1))
    with Transaction(str(tmp_path / "a.ckpt"), save_id="x") as transaction:
        transaction.commit(manifest_of(1, (transaction.write_bytes(TREE, b"1"),)))
    assert verify(str(tmp_path / "a.ckpt")) == []


def test_directories_and_files_obey_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        save(str(tmp_path / "run" / "a.ckpt"), 1)
    finally:
        os.umask(before)
    directory = tmp_path / "run" / "a.ckpt"
    assert {stat.S_IMODE(path.stat().st_mode) for path in directory.iterdir()} == {0o640}
    assert {stat.S_IMODE(path.stat().st_mode) for path in (directory, directory.parent)} == {0o750}


def test_a_full_disk_leaves_the_old_checkpoint_and_no_remains(tmp_path: Path) -> None:
    with small_disk(tmp_path / "small") as directory:
        destination = str(directory / "a.ckpt")
        save(destination, 1)
        for step in (2, 3):
            with pytest.raises(SaveFailedError, match="No space"):
                save(destination, step, size=4 << 20)
        assert step_of(destination) == 1
        assert [path.name for path in directory.iterdir()] == ["a.ckpt"]
        save(destination, 4)
        assert step_of(destination) == 4


def test_a_disk_that_fills_up_at_any_file_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    """The space left shrinks page by page, so that image, tree and manifest each meet the full disk once."""
    with small_disk(tmp_path / "small") as directory:
        destination = str(directory / "a.ckpt")
        save(destination, 1, size=5000)
        if not os.path.ismount(directory):  # only a limit on the size of single files can be had here
            return
        outcomes = {_save_with_free_pages(directory, destination, pages) for pages in range(12)}
        assert outcomes == {True, False}


def _save_with_free_pages(directory: Path, destination: str, pages: int) -> bool:
    free = os.statvfs(directory).f_bavail
    (directory / "filler").write_bytes(b"x" * 4096 * (free - pages))
    old = step_of(destination)
    try:
        save(destination, old + 1, size=5000)
        return True
    except SaveFailedError:
        assert step_of(destination) == old
        return False
    finally:
        (directory / "filler").unlink()
        assert [path.name for path in directory.iterdir()] == ["a.ckpt"]


@contextmanager
def small_disk(path: Path) -> Iterator[Path]:
    """A tmpfs of 1 MiB where one may be mounted; else a limit on the size of each file."""
    import resource

    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(path)]
    if os.geteuid() == 0 and subprocess.run(command, capture_output=True).returncode == 0:
        try:
            yield path
        finally:
            subprocess.run(["umount", "-l", str(path)], check=True)
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        yield path
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_directory_without_write_permission_is_reported(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)  # root may write anywhere
    try:
        with pytest.raises(SaveFailedError, match="rights"):
            save(str(tmp_path / "a.ckpt"), 1)
    finally:
        os.seteuid(user)
        tmp_path.chmod(0o700)
    assert list(tmp_path.iterdir()) == []


def _save_for_ever(destination: str, first: int, exchangeable: bool) -> None:
    exchange = exchange_names if exchangeable else no_exchange
    for step in range(first, first + 1_000_000):
        save(destination, step, exchange=exchange)


@pytest.mark.parametrize("exchangeable", [True, False])
def test_a_kill_at_any_moment_leaves_the_old_or_the_new_checkpoint(tmp_path: Path, exchangeable: bool) -> None:
    """A real process saves over one name again and again and gets SIGKILL at a random moment, many times."""
    context = multiprocessing.get_context("fork")
    destination, chance = str(tmp_path / "a.ckpt"), random.Random(0)
    save(destination, 0)
    left_behind, steps = 0, [0]
    for _ in range(40):
        process = context.Process(target=_save_for_ever, args=(destination, steps[-1] + 1, exchangeable))
        process.start()
        time.sleep(chance.uniform(0.005, 0.06))
        process.kill()
        process.join(60)
        assert process.exitcode == -9
        steps.append(step_of(destination))
        left_behind += len(list(tmp_path.iterdir())) - 1
        sweep_incomplete(str(tmp_path), older_than=-1)
        assert [path.name for path in tmp_path.iterdir()] == ["a.ckpt"]
        assert step_of(destination) == steps[-1]
    assert steps == sorted(steps)
    assert steps[-1] > 0
    assert left_behind > 0, "no kill met a save under way: the test proved nothing"
