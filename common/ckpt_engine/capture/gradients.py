"""The gradient log: what an update used, copied to the host before it is gone."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ckpt_engine.capture.context import Context, WindowStats
from ckpt_engine.capture.link import Copy, Ticket
from ckpt_engine.capture.shadow import Captured, LogEntry, autocast_of, dense_like, hyper_of
from ckpt_engine.capture.units import Unit

Logged = tuple[LogEntry, Ticket | None, list[Tensor]]


class GradientLog:
    """Copies the gradients of captured blocks, update by update.

    A gradient lives until the update writes into it, or until it is zeroed or the next backward reuses its buffer. In
    the first case the copy ends before the update; in the second it may run on while the update and the next forward
    do, and :meth:`fence` ends it (GoCkpt-O, section 4).
    """

    def __init__(self, context: Context, stats: WindowStats) -> None:
        self._context = context
        self._stats = stats
        self._pending: dict[int, Logged] = {}
        self._in_flight: list[Ticket] = []
        self._versions: list[tuple[Tensor, int]] = []

    def is_pending(self, index: int) -> bool:
        """Whether an update of optimizer ``index`` was announced and not reported as applied."""
        return index in self._pending

    @property
    def pending(self) -> list[int]:
        """Optimizers whose last announced update was not reported as applied."""
        return list(self._pending)

    def open(
        self, index: int, blocks: Sequence[Captured], *, found_inf: Tensor | None, scale: Tensor | None
    ) -> list[Unit]:
        """Log the gradients that the coming update of optimizer ``index`` will use.

        Returns:
            Units whose gradient is sparse and cannot be logged; their blocks are not part of the entry.
        """
        entry = LogEntry(
            hyper=hyper_of(self._context.optimizers[index]),
            grads=[],
            found_inf=_on_host(found_inf),
            grad_scale=_on_host(scale),
            autocast=autocast_of(self._context.optimizers[index]),
        )
        sparse = {
            held.block.unit: None
            for held in blocks
            if (grad := held.block.unit.tensor.grad) is not None and grad.layout is not torch.strided
        }
        blocks = [held for held in blocks if held.block.unit not in sparse]
        self._make_room(blocks)
        copies, buffers = self._stage(entry, blocks)
        for host, live in ((entry.found_inf, found_inf), (entry.grad_scale, scale)):
            if host is not None and live is not None and live.device.type != "cpu":
                # By the link, in order with the gradients: reading it here would stop the host for the device.
                copies.append(Copy(host, live.detach()))
        ticket = self._submit(copies) if copies else None
        self._pending[index] = (entry, ticket, buffers)
        survives = self._context.fenced and self._context.traits[index].keeps_grad and scale is None
        if ticket is not None and not survives:
            self._stats.stall_s += self._context.link.barrier([ticket], self._context.config.save_timeout_s)
        elif ticket is not None:
            self._in_flight.append(ticket)
            self._versions += [(copy.src, copy.src._version) for copy in copies]
        return list(sparse)

    def close(self, index: int) -> Logged | None:
        """Take the entry of an update that was applied."""
        return self._pending.pop(index, None)

    def discard(self, index: int) -> None:
        """Forget an update that was announced and not applied."""
        logged = self._pending.pop(index, None)
        if logged is not None:
            self._release(logged)

    def fence(self) -> bool:
        """Wait until no copy reads a gradient any more; False when one was overwritten meanwhile."""
        tickets, self._in_flight = self._in_flight, []
        versions, self._versions = self._versions, []
        if tickets:
            self._stats.stall_s += self._context.link.barrier(tickets, self._context.config.save_timeout_s)
        return all(grad._version == version for grad, version in versions)

    def abandon(self) -> None:
        """Give back every buffer of entries that will not be replayed."""
        self.fence()
        for index in list(self._pending):
            self.discard(index)

    def _release(self, logged: Logged) -> None:
        _, ticket, buffers = logged
        if ticket is not None:
            ticket.wait(self._context.config.save_timeout_s)
        for buffer in buffers:
            self._context.staging.give(buffer)

    def _make_room(self, blocks: Sequence[Captured]) -> None:
        """Wait for replay when more gradients are owed on the host than the bound allows."""
        coming = sum((held.block.high - held.block.low) * held.block.unit.tensor.element_size() for held in blocks)
        limit = self._context.config.owed_bytes or 2 * coming
        if self._context.staging.outstanding + coming > limit:
            start = self._context.clock()
            self._context.replay.drain(self._context.config.save_timeout_s)
            self._stats.stall_s += self._context.clock() - start

    def _stage(self, entry: LogEntry, blocks: Sequence[Captured]) -> tuple[list[Copy], list[Tensor]]:
        copies: list[Copy] = []
        buffers: list[Tensor] = []
        flat: dict[Unit, Tensor] = {}
        for held in blocks:
            unit = held.block.unit
            grad = unit.tensor.grad
            if grad is None:
                entry.grads.append((held, None))
                continue
            source = grad.detach()
            if held.parameter.dim() == 1 and unit.flat and source.dim() > 0:
                # reshape copies a gradient that is not contiguous, once for all blocks of the unit.
                whole = flat.setdefault(unit, source.reshape(-1))
                source = whole[held.block.low : held.block.high]
            buffer = self._context.staging.take(source.nbytes)
            self._context.link.pin(buffer)
            target = dense_like(buffer, source)
            buffers.append(buffer)
            if source.numel():
                copies.append(Copy(target, source))
            entry.grads.append((held, target))
            self._stats.gradient_bytes += source.nbytes
        return copies, buffers

    def _submit(self, copies: Sequence[Copy]) -> Ticket:
        start, clock, timeline = self._context.clock(), self._context.clock, self._context.timeline

        def done() -> None:
            timeline.add("gradient copies", "gradients", start, clock())

        return self._context.link.submit(copies, urgent=True, on_done=done)


def _on_host(value: Tensor | None) -> Tensor | None:
    """A host copy of a scalar; for one on a device only its memory, filled by the link."""
    if value is None:
        return None
    return torch.empty_like(value, device="cpu") if value.device.type != "cpu" else value.detach().clone()
