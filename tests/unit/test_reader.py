"""A checkpoint comes back exactly, in few large reads, and no file can ask for more memory than it holds."""

from __future__ import annotations

import gc
import json
import os
import resource
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_engine.errors import CorruptCheckpointError, NoCheckpointError
from ckpt_engine.image.checksum import digests
from ckpt_engine.image.manifest import Manifest
from ckpt_engine.restore.reader import load, load_newest, verify
from ckpt_engine.storage.backend import backend_for, join
from ckpt_engine.storage.cleanup import remove_checkpoint
from tests.conftest import write_checkpoint

IMAGE = "rank-00000.safetensors"


def state_of(seed: int = 0, rows: int = 64) -> dict[str, object]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "model": {
            "weight": torch.randn(rows, 33, generator=generator),
            "half": torch.randn(7, generator=generator).to(torch.bfloat16),
            "empty": torch.empty(0, 3),
            "scalar": torch.tensor(3.5, dtype=torch.float64),
            "flags": torch.tensor([True, False, True]),
        },
        "extra": {"rng": torch.arange(100, dtype=torch.uint8)},
        "loop": {"step": 12, "best": float("inf"), "names": ["a", "b"]},
    }


def assert_same(found: object, wanted: object) -> None:
    if isinstance(wanted, dict):
        assert isinstance(found, dict)
        assert found.keys() == wanted.keys()
        for key in wanted:
            assert_same(found[key], wanted[key])
    elif isinstance(wanted, torch.Tensor):
        assert isinstance(found, torch.Tensor)
        assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
        assert torch.equal(found, wanted)
    else:
        assert found == wanted


@pytest.fixture(params=["local", "remote"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    url = str(tmp_path / "run") if request.param == "local" else f"memory://{uuid.uuid4().hex}/run"
    yield url
    backend_for(url).remove_tree(url)


@pytest.mark.parametrize("check", [True, False])
def test_state_comes_back_exactly(root: str, make_checkpoint: Callable[..., str], check: bool) -> None:
    path = make_checkpoint(join(root, "a.ckpt"), state_of(), step=12)
    assert verify(path) == []
    loaded = load(path, verify=check)
    assert loaded.manifest.step == 12
    assert_same(loaded.state, state_of())
    assert {record.name for record in loaded.manifest.tensors} == loaded.tensors.keys()


def test_many_chunks_read_by_several_threads_land_in_their_places(
    root: str, make_checkpoint: Callable[..., str]
) -> None:
    path = make_checkpoint(join(root, "a.ckpt"), state_of(rows=40_000), chunk_bytes=64 * 1024 + 8)
    assert_same(load(path).state, state_of(rows=40_000))
    assert verify(path) == []


def test_every_damaged_chunk_is_named_with_its_bytes(tmp_path: Path, make_checkpoint: Callable[..., str]) -> None:
    path = Path(make_checkpoint(str(tmp_path / "a.ckpt"), state_of(rows=40_000), chunk_bytes=65536))
    data = bytearray((path / IMAGE).read_bytes())
    data[3 * 65536] ^= 1
    data[20 * 65536 + 5] ^= 1
    (path / IMAGE).write_bytes(data)
    for message in ("\n".join(verify(str(path))), str(_failure(lambda: load(str(path))))):
        assert f"{IMAGE}, chunk 3 (bytes {3 * 65536} to {4 * 65536})" in message
        assert f"{IMAGE}, chunk 20 (" in message
        assert message.count("is damaged: its bytes") == 2


def test_tensors_live_on_when_everything_else_is_gone(tmp_path: Path, make_checkpoint: Callable[..., str]) -> None:
    path = make_checkpoint(str(tmp_path / "a.ckpt"), state_of())
    weight = load(path).tensors["model.weight"]
    remove_checkpoint(path)
    gc.collect()
    wanted = state_of()["model"]
    assert isinstance(wanted, dict)
    assert torch.equal(weight, wanted["weight"])
    weight.add_(1)


def test_tensors_are_views_of_the_memory_that_was_read_into(
    tmp_path: Path, make_checkpoint: Callable[..., str]
) -> None:
    tensors = load(make_checkpoint(str(tmp_path / "a.ckpt"), state_of())).tensors
    image = {tensors[name].untyped_storage().data_ptr() for name in tensors if name.startswith("model.w")}
    assert len(image) == 1
    weight = tensors["model.weight"]
    assert weight.untyped_storage().data_ptr() != weight.data_ptr()


def test_loading_what_is_no_checkpoint_says_so(tmp_path: Path) -> None:
    (tmp_path / "vanilla.ckpt").write_bytes(b"pickle")
    (tmp_path / "empty.ckpt").mkdir()
    for name in ("vanilla.ckpt", "empty.ckpt", "missing.ckpt"):
        with pytest.raises(NoCheckpointError, match=name):
            load(str(tmp_path / name))
        assert len(verify(str(tmp_path / name))) == 1


def test_a_rank_that_did_not_save_is_refused(tmp_path: Path, make_checkpoint: Callable[..., str]) -> None:
    with pytest.raises(CorruptCheckpointError, match="rank 3"):
        load(make_checkpoint(str(tmp_path / "a.ckpt"), state_of()), rank=3)


def test_a_declared_size_beyond_the_file_takes_no_memory(tmp_path: Path, make_checkpoint: Callable[..., str]) -> None:
    path = make_checkpoint(str(tmp_path / "a.ckpt"), state_of())
    huge = 1 << 50
    forge(path, lambda m: replace(m, files=tuple(_claim(record, huge) for record in m.files)))
    with limited_memory(1 << 30):
        failure = _failure(lambda: load(path))
    assert f"instead of {huge}" in str(failure)


def test_a_header_that_asks_for_more_than_the_file_is_refused(
    tmp_path: Path, make_checkpoint: Callable[..., str]
) -> None:
    path = make_checkpoint(str(tmp_path / "a.ckpt"), state_of())
    good = (Path(path) / IMAGE).read_bytes()
    header = json.loads(good[8 : 8 + int.from_bytes(good[:8], "little")])
    name = next(key for key in header if key != "__metadata__")
    header[name] = {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 1 << 42]}
    forged_headers = [
        (1 << 62).to_bytes(8, "little") + good[8:],
        (0).to_bytes(8, "little") + good[8:],
        good[:8] + json.dumps(header).encode().ljust(int.from_bytes(good[:8], "little")) + good[4096:],
        good[:8] + b"[" * 4000 + good[4008:],
    ]
    for data in forged_headers:
        (Path(path) / IMAGE).write_bytes(data)
        forge(path, lambda m: redigest(path, m))
        with limited_memory(1 << 30):
            failure = _failure(lambda: load(path))
        assert IMAGE in str(failure)


def test_header_and_manifest_must_agree_on_where_a_tensor_lies(
    tmp_path: Path, make_checkpoint: Callable[..., str]
) -> None:
    path = make_checkpoint(str(tmp_path / "a.ckpt"), state_of())
    forge(path, lambda m: replace(m, tensors=(replace(m.tensors[0], name="model.other"), *m.tensors[1:])))
    with pytest.raises(CorruptCheckpointError, match=r"model\.other"):
        load(path)


def test_code_in_the_state_is_refused_and_not_run(tmp_path: Path, make_checkpoint: Callable[..., str]) -> None:
    marker = tmp_path / "executed"
    path = make_checkpoint(str(tmp_path / "a.ckpt"), {"model": {}, "extra": {"bad": Payload(str(marker))}})
    with pytest.raises(Exception, match="weights_only"):
        load(path)
    assert not marker.exists()


def test_the_newest_whole_checkpoint_is_loaded(root: str, make_checkpoint: Callable[..., str]) -> None:
    for step in (1, 2, 3):
        make_checkpoint(join(root, f"{step}.ckpt"), state_of(step), step=step)
    backend, image = backend_for(root), join(root, f"3.ckpt/{IMAGE}")
    data = bytearray(backend.read_bytes(image))
    data[-3] ^= 4
    backend.remove_file(image)
    backend.write_bytes(image, bytes(data))
    told: list[str] = []
    path, loaded = load_newest(root, on_problem=told.append)
    assert (path, loaded.manifest.step) == (join(root, "2.ckpt"), 2)
    assert_same(loaded.state, state_of(2))
    assert len(told) == 1
    assert "3.ckpt" in told[0]
    with pytest.raises(NoCheckpointError):
        load_newest(join(root, "nowhere"))


class Payload:
    """Unpickling it would create a file."""

    def __init__(self, marker: str) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, ...]:
        return (open, (self.marker, "w"))


def forge(path: str, change: Callable[[Manifest], Manifest]) -> None:
    """Write a changed manifest with digests that fit: damage that no checksum can show."""
    file = Path(path) / "manifest.json"
    manifest = change(Manifest.from_bytes(file.read_bytes()))
    file.write_bytes(manifest.to_bytes())


def redigest(path: str, manifest: Manifest) -> Manifest:
    data = (Path(path) / IMAGE).read_bytes()
    files = tuple(
        replace(record, size=len(data), digests=tuple(digests(memoryview(data), record.chunk_bytes)))
        if record.name == IMAGE
        else record
        for record in manifest.files
    )
    return replace(manifest, files=files)


def _claim(record: object, size: int) -> object:
    """A record that claims ``size`` bytes in one chunk."""
    return replace(record, size=size, chunk_bytes=size, digests=record.digests[:1])  # type: ignore[type-var, attr-defined]


def _failure(call: Callable[[], object]) -> CorruptCheckpointError:
    with pytest.raises(CorruptCheckpointError) as caught:
        call()
    return caught.value


class limited_memory:  # noqa: N801
    """No more than ``nbytes`` of address space beyond what the process has, enforced by the kernel."""

    def __init__(self, nbytes: int) -> None:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        self.limit = pages * os.sysconf("SC_PAGE_SIZE") + nbytes

    def __enter__(self) -> None:
        self.before = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (self.limit, self.before[1]))

    def __exit__(self, *_: object) -> None:
        resource.setrlimit(resource.RLIMIT_AS, self.before)


def test_the_state_of_a_generator_can_be_set_as_it_was_loaded(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(11)
    # Ahead of it in the file is something else, so that it does not lie at the start of its buffer.
    write_checkpoint(str(tmp_path / "a.ckpt"), {"other": torch.ones(3), "generator": generator.get_state()})
    state: Any = load(str(tmp_path / "a.ckpt")).state
    again = torch.Generator()
    again.set_state(state["generator"])
    assert torch.equal(torch.rand(5, generator=again), torch.rand(5, generator=generator))
