"""Images reach the disk whole, aligned where the file system takes it, or are reported and leave nothing."""

from __future__ import annotations

import errno
import mmap
import os
import resource
import stat
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ckpt_engine.errors import ConfigError, SaveFailedError
from ckpt_engine.image.checksum import digests
from ckpt_engine.storage.backend import FsspecBackend
from ckpt_engine.storage.writer import ALIGNMENT, upload_image, write_image

CHUNK = 64 * 1024


def aligned(nbytes: int, shift: int = 0) -> memoryview:
    """Random bytes that start ``shift`` bytes after a page."""
    memory = memoryview(mmap.mmap(-1, nbytes + shift + 1))[shift : shift + nbytes]
    memory[:] = os.urandom(nbytes)
    return memory


@contextmanager
def mounted(kind: str, path: Path, options: str) -> Iterator[bool]:
    """A real small file system, where the rights of the process allow one."""
    path.mkdir()
    command = ["mount", "-t", kind, "-o", options, "none", str(path)]
    done = os.geteuid() == 0 and subprocess.run(command, capture_output=True).returncode == 0
    try:
        yield done
    finally:
        if done:
            subprocess.run(["umount", "-l", str(path)], check=True)


@contextmanager
def file_size_limit(nbytes: int) -> Iterator[None]:
    """The kernel's own limit on file size: a write past it fails as on a full disk, with EFBIG."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextmanager
def little_space(path: Path) -> Iterator[Path]:
    """A directory in which nothing above about 1 MiB can be written, by whatever means there are here."""
    with mounted("tmpfs", path, "size=1m") as done:
        if done:
            yield path
            return
        with file_size_limit(1 << 20):
            yield path


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize(
    "size", [0, 1, 511, 4095, 4096, 4097, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK, 3 * CHUNK + 4096, 300_001]
)
def test_the_file_holds_exactly_the_memory_and_its_digests(tmp_path: Path, size: int, direct: bool) -> None:
    memory, path = aligned(size), tmp_path / "rank-00000.safetensors"
    record = write_image(str(path), memory, chunk_bytes=CHUNK, direct=direct)
    assert path.read_bytes() == bytes(memory)
    assert (record.name, record.size, record.chunk_bytes) == (path.name, size, CHUNK)
    assert record.digests == tuple(digests(memory, CHUNK))


def test_memory_of_any_element_type_is_written_as_bytes(tmp_path: Path) -> None:
    memory = aligned(8 * CHUNK).cast("d")
    assert write_image(str(tmp_path / "a"), memory, chunk_bytes=CHUNK).size == 8 * CHUNK
    assert (tmp_path / "a").read_bytes() == bytes(memory)


def test_memory_with_gaps_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="contiguous"):
        write_image(str(tmp_path / "a"), memoryview(bytearray(10))[::2])


def test_a_write_that_refuses_after_the_open_agreed_goes_on_through_the_page_cache(tmp_path: Path) -> None:
    """Memory that does not start at a block: ext4, xfs and others take O_DIRECT, then refuse the write itself."""
    memory = aligned(3 * CHUNK + 5, shift=1)
    record = write_image(str(tmp_path / "a"), memory, chunk_bytes=CHUNK, direct=True)
    assert (tmp_path / "a").read_bytes() == bytes(memory)
    assert record.digests == tuple(digests(memory, CHUNK))


def test_the_kernel_takes_such_a_write_whole_or_refuses_it_as_expected(tmp_path: Path) -> None:
    """What the test above stands on, asked of the kernel directly."""
    fd = os.open(tmp_path / "a", os.O_WRONLY | os.O_CREAT | os.O_DIRECT)
    try:
        written = os.write(fd, aligned(ALIGNMENT, shift=1))
    except OSError as error:
        written = -error.errno
    finally:
        os.close(fd)
    assert written in (ALIGNMENT, -errno.EINVAL)


def test_a_refusal_in_mid_file_keeps_what_was_written_before_it(tmp_path: Path) -> None:
    """Chunks that end off a block force the change after whole blocks were written directly."""
    memory = aligned(10 * CHUNK)
    write_image(str(tmp_path / "a"), memory, chunk_bytes=3 * ALIGNMENT + 100, direct=True)
    assert (tmp_path / "a").read_bytes() == bytes(memory)


@pytest.mark.parametrize("kind", ["ramfs", "tmpfs"])
def test_file_systems_without_direct_io_are_written_all_the_same(tmp_path: Path, kind: str) -> None:
    with mounted(kind, tmp_path / "fs", "size=4m") as done:
        # Without the right to mount, /dev/shm is the tmpfs that is there already.
        directory = tmp_path / "fs" if done else Path("/dev/shm")
        path, memory = directory / f"writer-{os.getpid()}", aligned(CHUNK + 5)
        try:
            write_image(str(path), memory, chunk_bytes=CHUNK, direct=True)
            assert path.read_bytes() == bytes(memory)
        finally:
            path.unlink()


@pytest.mark.parametrize("direct", [True, False])
def test_a_full_disk_is_reported_with_what_was_needed_and_what_is_free(tmp_path: Path, direct: bool) -> None:
    memory = aligned(4 << 20)
    with little_space(tmp_path / "small") as directory:
        before = open_files()
        with pytest.raises(SaveFailedError, match=r"needs 4,194,304 bytes and [\d,]+ are free"):
            write_image(str(directory / "a"), memory, chunk_bytes=CHUNK, direct=direct)
        assert open_files() == before
        assert list(directory.iterdir()) == []
        assert write_image(str(directory / "b"), memory[:CHUNK]).size == CHUNK


@pytest.mark.parametrize("direct", [True, False])
def test_a_file_size_limit_is_reported_like_a_full_disk(tmp_path: Path, direct: bool) -> None:
    with file_size_limit(100_000), pytest.raises(SaveFailedError, match="needs 1,048,576 bytes"):
        write_image(str(tmp_path / "a"), aligned(1 << 20), chunk_bytes=CHUNK, direct=direct)
    assert list(tmp_path.iterdir()) == []


def test_an_existing_file_is_never_written_into(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"linked elsewhere")
    with pytest.raises(SaveFailedError, match="never written into"):
        write_image(str(tmp_path / "a"), aligned(CHUNK))
    assert (tmp_path / "a").read_bytes() == b"linked elsewhere"


def test_a_missing_directory_is_reported_with_the_path(tmp_path: Path) -> None:
    with pytest.raises(SaveFailedError, match="none/a"):
        write_image(str(tmp_path / "none" / "a"), aligned(10))


def test_no_file_stays_open_after_success_or_failure(tmp_path: Path) -> None:
    before = open_files()
    write_image(str(tmp_path / "a"), aligned(CHUNK))
    for call in (lambda: write_image(str(tmp_path / "a"), aligned(CHUNK)), lambda: _bad_chunk(tmp_path)):
        _expect_failure(call)
    assert open_files() == before


def _bad_chunk(tmp_path: Path) -> None:
    write_image(str(tmp_path / "b"), aligned(CHUNK), chunk_bytes=0)


def _expect_failure(call: Callable[[], object]) -> None:
    with pytest.raises((SaveFailedError, ValueError)):
        call()


def test_files_obey_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_image(str(tmp_path / "a"), aligned(10))
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o640


def test_several_threads_write_several_images_at_once(tmp_path: Path) -> None:
    memories = [aligned(5 * CHUNK + i) for i in range(4)]
    threads = [
        threading.Thread(target=write_image, args=(str(tmp_path / f"{i}"), memory), kwargs={"chunk_bytes": CHUNK})
        for i, memory in enumerate(memories)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [(tmp_path / f"{i}").read_bytes() == bytes(m) for i, m in enumerate(memories)] == [True] * 4


def test_an_upload_has_the_same_record_as_a_local_file(tmp_path: Path) -> None:
    memory = aligned(3 * CHUNK + 7)
    local = write_image(str(tmp_path / "a"), memory, chunk_bytes=CHUNK)
    remote = upload_image(FsspecBackend(), f"memory://{tmp_path.name}/a", memory, chunk_bytes=CHUNK)
    assert remote == local
    assert FsspecBackend().read_bytes(f"memory://{tmp_path.name}/a") == bytes(memory)
