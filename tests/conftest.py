"""What several test files share."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Mapping

import pytest
import torch

from ckpt_engine.image.arena import HostBuffer
from ckpt_engine.image.codec import encode
from ckpt_engine.image.layout import Layout, TensorSpec
from ckpt_engine.image.manifest import FileRecord, Manifest, TensorRecord
from ckpt_engine.storage.transaction import Transaction

MakeCheckpoint = Callable[..., str]


@pytest.fixture
def make_checkpoint() -> MakeCheckpoint:
    """Writes a real checkpoint: ``make_checkpoint(destination, state, step=1)``; returns the destination."""
    return write_checkpoint


def write_checkpoint(
    destination: str, state: object, *, step: int = 1, chunk_bytes: int = 1 << 20, **options: object
) -> str:
    """``state`` in the files of rank 0: parameters in the image, what else holds tensors in the extra file."""
    encoded = encode(state, lambda tensor, path: path)
    image = {name: value for name, value in encoded.tensors.items() if not name.startswith("extra")}
    extra = {name: value for name, value in encoded.tensors.items() if name.startswith("extra")}
    files: list[FileRecord] = []
    tensors: list[TensorRecord] = []
    with Transaction(destination, save_id=uuid.uuid4().hex, **options) as transaction:  # type: ignore[arg-type]
        for name, part in (("rank-00000.safetensors", image), ("rank-00000.extra.safetensors", extra)):
            buffer, records = fill(name, part)
            files.append(transaction.write_image(name, buffer, chunk_bytes=chunk_bytes))
            tensors.extend(records)
        tree = json.dumps(encoded.tree).encode()
        files.append(transaction.write_bytes("rank-00000.json", tree))
        transaction.commit(
            Manifest(
                version=1,
                save_id=uuid.uuid4().hex,
                step=step,
                created=float(step),
                world_size=1,
                files=tuple(files),
                tensors=tuple(tensors),
                window={},
                audit={},
                meta={},
            )
        )
    return destination


def fill(file: str, tensors: Mapping[str, torch.Tensor]) -> tuple[memoryview, list[TensorRecord]]:
    """An image of ``tensors`` in host memory, and where each of them lies."""
    specs = [TensorSpec(name=name, dtype=t.dtype, shape=tuple(t.shape)) for name, t in tensors.items()]
    layout = Layout.build(specs)
    buffer = HostBuffer(layout.total_bytes)
    buffer.memory[: layout.data_start] = layout.header
    for name, view in layout.views(buffer.tensor).items():
        view.copy_(tensors[name])
    records = [
        TensorRecord(
            name=spec.name,
            dtype=str(spec.dtype).removeprefix("torch."),
            shape=tuple(spec.shape),
            file=file,
            offset=layout.offset(spec.name),
            nbytes=layout.nbytes(spec.name),
            global_shape=tuple(spec.shape),
            box_offset=(0,) * len(spec.shape),
        )
        for spec in layout.specs
    ]
    return buffer.memory[: layout.total_bytes], records
