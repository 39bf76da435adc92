"""From a captured image to a durable checkpoint: the jobs of the persist thread, in order.

A save that fails does not stop training: it is reported, and what was queued to follow it (removing an older one,
moving a link) is not done, so that nothing valid is ever deleted for a checkpoint that does not exist.
"""

from __future__ import annotations

import json
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ckpt_engine.capture.window import Window
from ckpt_engine.errors import SaveFailedError, SaveTimeoutError
from ckpt_engine.image.arena import HostBuffer
from ckpt_engine.image.layout import Layout, TensorSpec
from ckpt_engine.image.manifest import FileRecord, Manifest, TensorRecord
from ckpt_engine.observe.record import SaveRecord
from ckpt_engine.observe.timeline import Timeline
from ckpt_engine.storage.transaction import Transaction

if TYPE_CHECKING:
    from ckpt_engine.capture.worker import Worker

IMAGE = "rank-00000.safetensors"
EXTRA = "rank-00000.extra.safetensors"
TREE = "rank-00000.json"


@dataclass(kw_only=True, eq=False, slots=True)
class Image:
    """One arena's content and the saves that share it.

    Args:
        layout: Where tensors lie in the arena.
        arena: The host memory.
        window: The window that captured it; None for a direct copy.
        release: Gives the arena back; called once, when no save needs it any more.
        users: Saves that still need the arena.
        written: Destination and file record of the first durable copy, which later saves link to.
    """

    layout: Layout
    arena: HostBuffer
    window: Window | None
    release: Callable[[], None]
    users: int = 0
    written: tuple[str, FileRecord] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveRequest:
    """What one save writes.

    Args:
        destination: Directory or URL of the checkpoint.
        step: The step it represents.
        tree: JSON-able state tree.
        extras: Tensors outside the image, on the host.
        meta: Free-form facts for the manifest.
        mode: How the image was captured.
        stall_s: Time that training waited in :meth:`Engine.save` itself.
        on_commit: Called on the persist thread with the record, once durable.
    """

    destination: str
    step: int
    tree: object
    extras: Mapping[str, Tensor]
    meta: Mapping[str, object]
    mode: str
    stall_s: float
    on_commit: Callable[[SaveRecord], None] | None


class SaveHandle:
    """The future of one save.

    Example:
        >>> handle = SaveHandle("checkpoints/step-1", 1)
        >>> handle.done
        False
    """

    def __init__(self, destination: str, step: int) -> None:
        self.destination = destination
        self.step = step
        self._finished = threading.Event()
        self._record: SaveRecord | None = None
        self._error: BaseException | None = None

    @property
    def done(self) -> bool:
        """Whether the save is durable or has failed."""
        return self._finished.is_set()

    def wait(self, timeout: float | None = None) -> SaveRecord:
        """Wait until the checkpoint is durable and return its record.

        Raises:
            SaveFailedError: The save failed; the cause is chained.
            SaveTimeoutError: It was not finished after ``timeout`` seconds.
        """
        if not self._finished.wait(timeout):
            raise SaveTimeoutError(
                f"The save of step {self.step} to {self.destination} was not durable after {timeout} s: "
                "training must go one step further, or call settle(), for a window to complete."
            )
        if self._error is not None:
            raise SaveFailedError(
                f"The save of step {self.step} to {self.destination} failed: {self._error} "
                "Earlier checkpoints are untouched."
            ) from self._error
        assert self._record is not None
        return self._record

    def finish(self, record: SaveRecord | None, error: BaseException | None) -> None:
        """Settle the outcome; called once, by the persist thread."""
        self._record, self._error = record, error
        self._finished.set()


@dataclass(kw_only=True, eq=False, slots=True)
class SaveQueue:
    """Runs saves and what follows them on the persist thread.

    Args:
        worker: The persist thread.
        replay: The replay thread, drained before an image is read.
        timeout: Bound in seconds on waiting for replay.
        direct_io: Write images with direct I/O where possible.
        on_record: Called with every record, failed ones included.
        timeline: Records when images are written.
        clock: Seconds, monotonic.
    """

    worker: Worker
    replay: Worker
    timeout: float
    direct_io: bool
    on_record: Callable[[SaveRecord], None]
    timeline: Timeline
    clock: Callable[[], float]
    last_failed: bool = False
    failures: list[SaveFailedError] = field(default_factory=list)

    def save(self, image: Image, request: SaveRequest, handle: SaveHandle) -> None:
        """Queue one save."""
        self.worker.submit(lambda: self._run(image, request, handle))

    def refuse(self, handle: SaveHandle, error: SaveFailedError) -> None:
        """Queue a save that does not happen: what follows it must not either."""
        self.worker.submit(lambda: self._refuse(handle, error))

    def then(self, action: Callable[[], None], what: str) -> None:
        """Queue an action that must not happen before, or without, the saves queued so far."""
        self.worker.submit(lambda: self._follow(action, what))

    def take_failures(self) -> list[SaveFailedError]:
        """Return the failures since the last call."""
        failures, self.failures = self.failures, []
        return failures

    def _refuse(self, handle: SaveHandle, error: SaveFailedError) -> None:
        self.last_failed = True
        handle.finish(None, error)

    def _follow(self, action: Callable[[], None], what: str) -> None:
        if not self.last_failed:
            self._try(action, what)

    def _try(self, action: Callable[[], None], what: str) -> None:
        try:
            action()
        except Exception as error:
            self.failures.append(SaveFailedError(f"After the save, {what} failed: {error!r}."))

    def _run(self, image: Image, request: SaveRequest, handle: SaveHandle) -> None:
        record: SaveRecord | None = None
        failure: BaseException | None = None
        start = self.clock()
        try:
            audit = self._audit(image)
            with self.timeline.span("persist", "checkpoint", self.clock, step=request.step):
                record = self._write(image, request, audit, start)
        except BaseException as error:
            failure = error
        finally:
            self._leave(image)
        self.last_failed = failure is not None
        if failure is not None:
            record = self._failed(image, request, failure)
        assert record is not None
        kept = record
        self._try(lambda: self.on_record(kept), "keeping the record")
        handle.finish(record if failure is None else None, failure)
        if failure is None and request.on_commit is not None:
            self._follow(lambda: request.on_commit(record), "the commit callback")  # type: ignore[misc]

    def _failed(self, image: Image, request: SaveRequest, error: BaseException) -> SaveRecord:
        wrapped = SaveFailedError(f"The save of step {request.step} to {request.destination} failed: {error}")
        wrapped.__cause__ = error
        self.failures.append(wrapped)
        return self._record(image, request, {}, persist_s=0.0, error=str(error))

    def _leave(self, image: Image) -> None:
        image.users -= 1
        if image.users == 0:
            image.release()

    def _audit(self, image: Image) -> dict[str, object]:
        if image.window is None:
            return {"kind": "direct copy", "result": "bit-exact"}
        self.replay.drain(self.timeout)
        return image.window.result().to_dict()

    def _write(self, image: Image, request: SaveRequest, audit: dict[str, object], start: float) -> SaveRecord:
        save_id = uuid.uuid4().hex
        transaction = Transaction(request.destination, save_id=save_id, direct_io=self.direct_io)
        transaction.begin()
        try:
            image_file = self._write_image(transaction, image)
            extra_layout, extra_file = _write_extras(transaction, request.extras)
            tree_file = transaction.write_bytes(TREE, json.dumps(request.tree, separators=(",", ":")).encode())
            record = self._record(image, request, audit, persist_s=self.clock() - start, error="")
            manifest = Manifest(
                save_id=save_id,
                step=request.step,
                created=time.time(),
                world_size=1,
                files=(image_file, extra_file, tree_file),
                tensors=(*tensor_records(image.layout, IMAGE), *tensor_records(extra_layout, EXTRA)),
                window=window_record(image.window, request.mode),
                audit=audit,
                meta=dict(request.meta),
            )
            transaction.commit(manifest)
        except BaseException:
            transaction.abort()
            raise
        image.written = image.written or (request.destination, image_file)
        return record

    def _write_image(self, transaction: Transaction, image: Image) -> FileRecord:
        if image.written is not None:
            try:
                return transaction.link_image(IMAGE, *image.written)
            except Exception:
                # The first copy may be gone or on another file system; the arena still holds the bytes.
                image.written = None
        return transaction.write_image(IMAGE, image.arena.memory[: image.layout.total_bytes])

    def _record(
        self, image: Image, request: SaveRequest, audit: dict[str, object], *, persist_s: float, error: str
    ) -> SaveRecord:
        stats = image.window.stats if image.window is not None else None
        return SaveRecord(
            step=request.step,
            destination=request.destination,
            mode=request.mode,
            window_steps=image.window.plan.steps if image.window is not None else 0,
            parts_bytes=tuple(stats.parts) if stats else (),
            image_bytes=image.layout.total_bytes,
            extra_bytes=sum(tensor.nbytes for tensor in request.extras.values()),
            gradient_bytes=stats.gradient_bytes if stats else 0,
            stall_s=request.stall_s + (stats.stall_s if stats else 0.0),
            replay_s=stats.replay_s if stats else 0.0,
            persist_s=persist_s,
            audit=audit,
            ok=not error,
            error=error,
        )


def _write_extras(transaction: Transaction, extras: Mapping[str, Tensor]) -> tuple[Layout, FileRecord]:
    layout = Layout.build([TensorSpec(name, t.dtype, tuple(t.shape)) for name, t in extras.items()])
    buffer = torch.zeros(layout.total_bytes, dtype=torch.uint8)
    buffer[: layout.data_start].copy_(torch.frombuffer(bytearray(layout.header), dtype=torch.uint8))
    for name, view in layout.views(buffer).items():
        view.copy_(extras[name])
    return layout, transaction.write_bytes(EXTRA, buffer.numpy().tobytes())


def tensor_records(layout: Layout, file: str) -> list[TensorRecord]:
    """The manifest's rows for the tensors of one file; on one rank every box is the whole tensor."""
    return [
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


def window_record(window: Window | None, mode: str) -> dict[str, object]:
    """How the image was captured, for the manifest."""
    if window is None:
        return {"mode": mode, "steps": 0}
    return {
        "mode": mode,
        "steps": window.plan.steps,
        "parts_bytes": list(window.stats.parts),
        "gradient_bytes": window.stats.gradient_bytes,
        "replayed_updates": window.stats.replayed,
        "recaptured_units": window.stats.recaptured,
        "direct_reason": window.reason,
    }
