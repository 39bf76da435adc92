"""Reads a checkpoint into host memory in large parallel reads, checking every chunk while it is in cache."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ckpt_engine.errors import CheckpointError, CorruptCheckpointError, NoCheckpointError
from ckpt_engine.image.arena import HostBuffer
from ckpt_engine.image.codec import decode
from ckpt_engine.image.layout import Layout
from ckpt_engine.image.manifest import FileRecord, Manifest, TensorRecord
from ckpt_engine.restore.catalog import candidates, no_checkpoint_message
from ckpt_engine.restore.integrity import (
    Chunk,
    check_files,
    chunks_of,
    for_each,
    read_chunk,
    read_manifest,
    resolve,
    verify,
)
from ckpt_engine.storage.backend import join

__all__ = ["Loaded", "load", "load_newest", "verify"]

_LOG = logging.getLogger(__name__)
_TENSORS = ".safetensors"
_TREE = ".json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Loaded:
    """A checkpoint in host memory.

    Args:
        manifest: Its commit record.
        tensors: Name -> tensor, views of the memory the files were read into; it lives as long as any of them.
        state: The nested state as it was saved, with those tensors at its leaves.
    """

    manifest: Manifest
    tensors: dict[str, torch.Tensor]
    state: object


def load(path: str, *, verify: bool = True, weights_only: bool = True, rank: int = 0) -> Loaded:
    """Read one rank's share of a checkpoint.

    Sizes are compared with those of the real files before memory is taken, so a damaged or hostile file
    cannot ask for more than it holds.

    Args:
        path: The checkpoint, a local path or URL.
        verify: Compare every chunk with its digest.
        weights_only: Refuse state that needs arbitrary code to be restored.
        rank: Whose files to read.

    Raises:
        NoCheckpointError: ``path`` is no complete checkpoint.
        CorruptCheckpointError: It is damaged; the message names file and chunk.
    """
    manifest, directory = read_manifest(path), resolve(path)
    _raise_any(path, check_files(directory, manifest))
    records = [record for record in manifest.files if record.name.startswith(f"rank-{rank:05d}.")]
    if not records:
        raise CorruptCheckpointError(f"{path} holds no files of rank {rank}; name a rank that saved it.")
    buffers = {record.name: HostBuffer(max(record.size, 1)) for record in records}
    memories = {record.name: buffers[record.name].memory[: record.size] for record in records}
    _raise_any(path, _fill(directory, records, memories, compare=verify))
    tensors: dict[str, torch.Tensor] = {}
    for record in records:
        if record.name.endswith(_TENSORS):
            tensors.update(_views(join(directory, record.name), record, buffers[record.name], manifest))
    state = _state(directory, records, memories, tensors, weights_only)
    return Loaded(manifest=manifest, tensors=tensors, state=state)


def load_newest(
    root: str,
    *,
    weights_only: bool = True,
    rank: int = 0,
    on_problem: Callable[[str], None] = _LOG.warning,
) -> tuple[str, Loaded]:
    """Read the newest checkpoint of ``root`` that is whole, checking while reading, so each byte is read once.

    Returns:
        Its path and its content.

    Raises:
        NoCheckpointError: There is none; the message lists what is wrong with those that were found.
    """
    problems: list[str] = []

    def note(problem: str) -> None:
        problems.append(problem)
        on_problem(problem)

    for entry in candidates(root, verify_data=False, on_problem=note):
        loaded = _load_or_note(entry.path, weights_only, rank, note)
        if loaded is not None:
            return entry.path, loaded
    raise NoCheckpointError(no_checkpoint_message(root, problems))


def _load_or_note(path: str, weights_only: bool, rank: int, note: Callable[[str], None]) -> Loaded | None:
    try:
        return load(path, weights_only=weights_only, rank=rank)
    except (CorruptCheckpointError, NoCheckpointError) as error:
        note(str(error))
    return None


def _fill(directory: str, records: list[FileRecord], memories: Mapping[str, memoryview], *, compare: bool) -> list[str]:
    def read(chunk: Chunk) -> str | None:
        memory = memories[chunk.file][chunk.offset : chunk.offset + chunk.nbytes]
        return read_chunk(directory, chunk, memory, compare=compare)

    return for_each(read, [chunk for record in records for chunk in chunks_of(record)])


def _views(path: str, record: FileRecord, buffer: HostBuffer, manifest: Manifest) -> dict[str, torch.Tensor]:
    """The tensors of one file, in place except for bytes. Its header and the manifest must tell the same."""
    try:
        layout = Layout.parse(_header(buffer.memory[: record.size]))
    except CheckpointError as error:
        raise CorruptCheckpointError(f"{path} has an invalid header: {error}") from error
    if layout.total_bytes != record.size:
        raise CorruptCheckpointError(
            f"{path} describes {layout.total_bytes} bytes of tensors but has {record.size} bytes."
        )
    for tensor in manifest.tensors:
        if tensor.file == record.name:
            _compare(path, layout, tensor)
    views = layout.views(buffer.tensor[: record.size])
    # Bytes may be the state of a torch.Generator, whose set_state reads the storage and ignores the view's offset.
    return {name: view.clone() if view.dtype == torch.uint8 else view for name, view in views.items()}


def _header(data: memoryview) -> bytes:
    """The length field and as much header as it asks for, never more than the file holds."""
    length = int.from_bytes(data[:8], "little")
    return bytes(data[: 8 + min(length, len(data))])


def _raise_any(path: str, problems: list[str]) -> None:
    if problems:
        listed = "\n  ".join(problems)
        raise CorruptCheckpointError(f"{path} is damaged; load an earlier checkpoint.\n  {listed}")


def _state(
    directory: str,
    records: list[FileRecord],
    memories: Mapping[str, memoryview],
    tensors: dict[str, torch.Tensor],
    weights_only: bool,
) -> object:
    for record in records:
        if record.name.endswith(_TREE):
            return decode(_tree(directory, record, memories), tensors, weights_only=weights_only)
    return None


def _tree(directory: str, record: FileRecord, memories: Mapping[str, memoryview]) -> Any:
    try:
        return json.loads(bytes(memories[record.name]))
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpointError(f"{join(directory, record.name)} is no valid JSON: {error}") from error


def _compare(path: str, layout: Layout, tensor: TensorRecord) -> None:
    try:
        same = (layout.offset(tensor.name), layout.nbytes(tensor.name)) == (tensor.offset, tensor.nbytes)
    except KeyError:
        same = False
    if not same:
        raise CorruptCheckpointError(
            f"{path}: the manifest places tensor {tensor.name} elsewhere than the header does."
        )
