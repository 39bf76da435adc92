"""A window: one checkpoint, captured over several steps of training (GoCkpt, section 4).

Let T be the target: the state after round T. A window of K steps opens when round T-K+1 is complete. Part j is copied
while round T-K+2+j runs, before that round's update; the gradients that an update uses are logged for the blocks
copied so far and replayed on the host, so that all blocks meet at T. The last part is the state after T itself,
copied during round T+1, and owes nothing. A window of one step is the special case without gradients.

Whatever cannot be replayed (an optimizer of another kind, a sparse gradient, a write from outside, a closure that runs
twice) is put back into the queue and copied in the last part instead: slower, and always right.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from ckpt_engine.capture.audit import AuditResult, Sample, compare, equals_live, take_samples
from ckpt_engine.capture.context import Context, WindowStats
from ckpt_engine.capture.gradients import GradientLog
from ckpt_engine.capture.guard import Guard, Stamp, stamp
from ckpt_engine.capture.link import Copy, Ticket
from ckpt_engine.capture.plan import WindowPlan, equal_budgets
from ckpt_engine.capture.shadow import Captured, LogEntry, ShadowOptimizer
from ckpt_engine.capture.snapshot import BlockCopier
from ckpt_engine.capture.units import Block, Unit, ViewKey, state_tensors, view_key
from ckpt_engine.errors import SaveFailedError
from ckpt_engine.image.arena import HostBuffer
from ckpt_engine.image.layout import Layout

_SMALL = 1 << 20
"""Bytes of a static tensor up to which it is compared whole: cheap, and no write through ``.data`` escapes."""


class Window:
    """The capture of one target step into one arena.

    Args:
        context: What windows of this engine share.
        plan: Steps and budgets.
        target: Step that the image will represent; also the seed of the audit's samples.
        units: What to capture.
        layout: Where it lies in the image.
        arena: Host memory of the image.
        resident: Stamps of static tensors that this arena still holds from an earlier window, by FQN.
        verify: Compare every replayed element with the live state at the target (the first window of a run does).
    """

    def __init__(
        self,
        context: Context,
        *,
        plan: WindowPlan,
        target: int,
        units: Sequence[Unit],
        layout: Layout,
        arena: HostBuffer,
        resident: dict[str, Stamp],
        verify: bool,
    ) -> None:
        self.plan = plan
        self.target = target
        self.units = units
        self.layout = layout
        self.arena = arena
        self.stats = WindowStats()
        self.sealed = False
        self.captured = False
        self.failed = False
        self.reason = ""
        self.spoiled: set[int] = set()
        self._owned_at_seal: set[tuple[str, torch.dtype, torch.Size]] = set()
        self._context = context
        self._resident = resident
        self._verify = verify
        self._closed = False
        self._views = layout.views(arena.tensor)
        self._copier = BlockCopier(self._views, context.optimizers)
        self._guard = Guard(context.optimizers)
        self._shadows = [
            ShadowOptimizer(optimizer, traits) if any(u.optimizer == i and not u.direct for u in units) else None
            for i, (optimizer, traits) in enumerate(zip(context.optimizers, context.traits, strict=True))
        ]
        self._log = GradientLog(context, self.stats)
        self._held: dict[Block, Captured] = {}
        self._tickets: list[Ticket] = []
        self._issued: list[Ticket] = []
        self._samples: list[Sample] = []
        self._part = 0
        self._error: BaseException | None = None
        self._audit: AuditResult | None = None
        arena.tensor[: layout.data_start].copy_(torch.frombuffer(bytearray(layout.header), dtype=torch.uint8))
        self._queue = deque(self._initial_queue())
        self._budgets = equal_budgets(plan, sum(block.nbytes for block in self._queue))

    # -- the five moments ------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Start this step's part: copies run while forward and backward do."""
        if self.captured:
            return
        if self.sealed:
            self._close_boundary()
            self._take_early()
            self._take(None)
            return
        self._recapture(self._guard.changed(self._captured_units()))
        self._take(self._budgets[self._part] if self._part < len(self._budgets) else 0)
        self._part += 1

    def before_update(self, index: int, *, found_inf: Tensor | None, scale: Tensor | None) -> None:
        """Gradients of optimizer ``index`` are final: finish this part's copies and log the gradients owed."""
        if self.captured:
            return
        self._wait_for_copies()
        if self.sealed:
            self.finish()
            return
        # Declared fences have passed by now, so this finds gradients that were overwritten without one.
        self.fence()
        self._spoil_early(self._guard.changed(self._units_of(index)))
        if self._log.is_pending(index):
            # The step before this one raised inside its update, or this closure runs a second time.
            self._spoil_unapplied(index)
            return
        blocks = [held for block, held in self._held.items() if block.unit.optimizer == index and not block.unit.direct]
        sparse = self._log.open(index, blocks, found_inf=found_inf, scale=scale)
        if sparse:
            self.spoil(sparse, "a gradient is sparse")

    def after_update(self, index: int) -> None:
        """The update was applied: its log entry is replayed."""
        if self.captured or self.sealed:
            return
        shadow = self._shadows[index]
        entry = self._log.close(index)
        if entry is not None and shadow is not None:
            self._submit(lambda: self._replay(shadow, *entry))
        for unit in self._units_of(index):
            self._guard.note(unit)

    def quiesce(self) -> None:
        """Wait until no copy reads live memory."""
        self._wait_for_copies()
        self.fence()

    def fence(self) -> None:
        """Gradient buffers are about to be written: wait for the copies that still read them."""
        if not self._log.fence():
            self.spoil([u for u in self.units if not u.is_static], "a gradient was overwritten before it was copied")

    def seal(self) -> None:
        """Training is at the target: copy what the next forward may change."""
        self._wait_for_copies()
        for index in self._log.pending:
            self._spoil_unapplied(index)
        self._take_early()
        self._take_static()
        for unit in self._optimized():
            self._guard.note_once(unit)
        self._owned_at_seal = self._owned()
        self.sealed = True

    def moved(self) -> bool:
        """Whether anything was written since the window was sealed: what is live now is another state."""
        return bool(self._guard.changed(self.units))

    def fail(self, error: BaseException) -> None:
        """Nothing more is captured; the saves that wait for this window fail with ``error``."""
        self._error = self._error or error
        self.captured = True

    def _close_boundary(self) -> None:
        """The last moment before the next round: parameters are final, hooks that ran after the save included."""
        if self._closed:
            return
        self._closed = True
        if not self._owned_at_seal <= self._owned():
            raise SaveFailedError(
                f"Parameters or optimizer state of step {self.target} went away before they were copied: the save is "
                "dropped. Call settle() after save() where the loop replaces them before its next step."
            )
        self._recapture(self._guard.changed(self._optimized()))
        if self._verify and self._held:
            self._compare_all()
        config = self._context.config
        self._samples = take_samples(self._optimized(), self._context.optimizers, kind=config.audit, seed=self.target)

    def _compare_all(self) -> None:
        """Look at every replayed element once per run: a loop that writes through `.data` shows here."""
        self._context.replay.drain(self._context.config.save_timeout_s)
        if self._error is not None:
            return
        self._settle_held()
        rtol = self._context.config.audit_rtol
        wrong = {
            held.block.unit: None
            for held in self._held.values()
            if not held.block.unit.is_static and not equals_live(self._copier.pairs(held), rtol=rtol)
        }
        if wrong:
            self.spoil(list(wrong), "its replay differs, or it was written outside the optimizer through .data")

    def finish(self) -> None:
        """Copy whatever is missing, now; only right while the state is the target's."""
        if self.captured:
            return
        self.fence()
        self._refuse_torn_copies()
        self._close_boundary()
        self._take(None)
        self._wait_for_copies()
        self.captured = True
        self._submit(self._complete)

    # -- results ---------------------------------------------------------------------------------------------------

    def owned(self) -> dict[ViewKey, str]:
        """Image name of every live tensor that the image holds."""
        return {view_key(tensor): name for unit in self.units for name, tensor in self._copier.owned(unit).items()}

    def result(self) -> AuditResult:
        """The audit of the finished image; call after the replay thread has been drained.

        Raises:
            SaveFailedError: Replay failed, or the image does not equal the live state.
        """
        if isinstance(self._error, SaveFailedError):
            raise self._error
        if self._error is not None:
            raise SaveFailedError(
                f"The window for step {self.target} could not be replayed: {self._error!r}. "
                "The save is dropped; earlier checkpoints are untouched."
            ) from self._error
        if self._audit is None:
            raise SaveFailedError(f"The window for step {self.target} was never completed: the save is dropped.")
        if not self._audit.passed:
            self.failed = True
            names = ", ".join(self._audit.failures[:5])
            raise SaveFailedError(
                f"The replayed image of step {self.target} differs from the live state in {len(self._audit.failures)} "
                f"tensor(s) ({names}): the save is dropped and later saves copy directly. Report the optimizer to "
                "the maintainers, or set mode='one_step'."
            )
        return self._audit

    def drop(self, timeout: float) -> None:
        """Give the window up: nothing reads live tensors or writes to the arena afterwards."""
        self._wait_for_copies()
        self._wait_on_host()
        self._log.abandon()
        self._context.replay.drain(timeout)
        self.captured = True

    def spoil(self, units: Sequence[Unit], reason: str) -> None:
        """Replay is off for ``units``: they are copied in the last part."""
        self.reason = self.reason or reason
        for unit in units:
            unit.direct = True
        self.spoiled |= {id(unit.tensor) for unit in units if not unit.is_static}
        self._recapture([unit for unit in units if any(block in self._held for block in unit.blocks)])
        self._queue = deque(sorted(self._queue, key=lambda block: block.unit.direct))

    def _spoil_unapplied(self, index: int) -> None:
        self.spoil([u for u in self.units if u.optimizer == index], "an update was not applied as announced")
        self._log.discard(index)

    def _spoil_early(self, units: Sequence[Unit]) -> None:
        """Parameters written between the start of a round and its update cannot be copied while it runs."""
        for unit in units:
            unit.early = True
        if units:
            self.spoil(units, f"the forward pass writes {_named(units)}, copied while training waits at the target")

    def _refuse_torn_copies(self) -> None:
        """After the boundary was closed, parameters may change only once their copies are made."""
        written = [unit for unit in self._guard.changed(self._optimized()) if not unit.early] if self._closed else []
        for unit in written:
            unit.early = True
        if written:
            self._error = self._error or SaveFailedError(
                f"{_named(written)} was written during the forward pass after step {self.target}, while it was being "
                "copied: this save is dropped, and later ones copy it while training waits at the target."
            )

    # -- copying ---------------------------------------------------------------------------------------------------

    def _initial_queue(self) -> list[Block]:
        static = [u for u in self.units if u.is_static and self._resident.get(u.fqn) != self._mark(u)]
        kept = [u for u in self.units if u.is_static and u not in static]
        for unit in kept:
            self._guard.note(unit)
        rest = [u for u in self.units if not u.is_static and not u.direct]
        direct = [u for u in self.units if not u.is_static and u.direct]
        return [block for unit in (*static, *rest, *direct) for block in unit.blocks]

    def _mark(self, unit: Unit) -> Stamp:
        return (id(unit.tensor), *stamp(unit, self._context.optimizers))

    def _take(self, budget: int | None) -> None:
        """Submit blocks from the queue, up to ``budget`` bytes; None takes all, direct units included."""
        taken = 0
        while self._queue:
            block = self._queue[0]
            late = block.unit.direct and not block.unit.is_static
            if budget is not None and (late or taken >= budget):
                break
            self._queue.popleft()
            self._capture(block)
            taken += block.nbytes
        if taken:
            self.stats.parts.append(taken)

    def _lacks_state(self, block: Block) -> bool:
        unit = block.unit
        if unit.is_static or unit.direct or self.sealed:
            return False
        return not set(unit.state_keys) <= state_tensors(self._context.optimizers[unit.optimizer], unit.tensor).keys()

    def _capture(self, block: Block) -> None:
        if self._lacks_state(block):
            # It was dropped by a load and is born again with the next update: wait for the target.
            block.unit.direct = True
            self._queue.append(block)
            return
        held, copies = self._copier.plan(block)
        self._held[block] = held
        if block.unit.is_static:
            # Until the window is sealed, the arena holds neither the old content nor surely the new one.
            self._resident.pop(block.unit.fqn, None)
        self._guard.note_once(block.unit)
        ticket = self._submit_copies(copies)
        shadow = None if block.unit.is_static or self.sealed else self._shadows[block.unit.optimizer]
        if shadow is not None and not block.unit.direct:
            self._submit(lambda: self._enlist(shadow, held, ticket))
        self.stats.scratch_bytes = self._copier.scratch_bytes

    def _submit_copies(self, copies: Sequence[Copy]) -> Ticket | None:
        if not copies:
            return None
        start, step, timeline = self._context.clock(), self.target, self._context.timeline
        clock = self._context.clock

        def done() -> None:
            timeline.add("state copies", "block", start, clock(), step=step)

        ticket = self._context.link.submit(copies, on_done=done)
        self._tickets.append(ticket)
        self._issued.append(ticket)
        return ticket

    def _wait_for_copies(self) -> None:
        tickets, self._tickets = self._tickets, []
        if tickets:
            stalled = self._context.link.barrier(tickets, self._context.config.save_timeout_s)
            self.stats.stall_s += stalled
            now = self._context.clock()
            self._context.timeline.add("stall", "barrier", now - stalled, now)

    def _wait_on_host(self) -> None:
        """Wait until what was copied can be read; a barrier alone may only order the device."""
        issued, self._issued = self._issued, []
        for ticket in issued:
            ticket.wait(self._context.config.save_timeout_s)

    def _take_early(self) -> None:
        """Units that the forward pass writes are copied while training waits."""
        wanted = [block for block in self._queue if block.unit.early]
        self._queue = deque(block for block in self._queue if not block.unit.early)
        for block in wanted:
            self._capture(block)
        self._wait_for_copies()

    def _take_static(self) -> None:
        """Static tensors are written by nobody between updates, so they are verified, and copied if they were."""
        static = [unit for unit in self.units if unit.is_static]
        wanted = [block for block in self._queue if block.unit.is_static]
        self._queue = deque(block for block in self._queue if not block.unit.is_static)
        changed = self._guard.changed(static)
        if static:
            self._wait_on_host()
        changed += [u for u in static if u not in changed and self._differs(u, wanted)]
        for unit in changed:
            self._guard.forget(unit)
        again = [block for unit in changed for block in unit.blocks if block not in wanted]
        for block in (*wanted, *again):
            self._capture(block)
        self._wait_for_copies()
        self._resident.clear()
        self._resident.update({unit.fqn: self._mark(unit) for unit in static})

    def _differs(self, unit: Unit, wanted: Sequence[Block]) -> bool:
        # Writes through `.data` leave no mark in the version counter: look at the values.
        if any(block.unit is unit for block in wanted):
            return False
        whole = self._context.config.audit == "full" or unit.tensor.nbytes <= _SMALL
        kind = "full" if whole else "sample"
        samples = take_samples([unit], self._context.optimizers, kind=kind, seed=self.target)
        return compare(samples, self._views, kind="static", rtol=0.0).different > 0

    def _recapture(self, units: Iterable[Unit]) -> None:
        """Put units back into the queue; replay of their older copies must be over before they are copied again."""
        units = list(units)
        if not units:
            return
        self.stats.recaptured += len(units)
        self._context.replay.drain(self._context.config.save_timeout_s)
        for unit in units:
            self._guard.forget(unit)
            for block in unit.blocks:
                held = self._held.pop(block, None)
                if held is None:
                    continue
                shadow = self._shadows[unit.optimizer]
                if shadow is not None and held.pieces:
                    shadow.remove(held)
                if unit.direct:
                    self._queue.append(block)
                else:
                    self._queue.appendleft(block)

    # -- replay, on its thread -------------------------------------------------------------------------------------

    def _submit(self, job: Callable[[], None]) -> None:
        def guarded() -> None:
            try:
                job()
            except BaseException as error:
                self._error = self._error or error

        self._context.replay.submit(guarded)

    def _enlist(self, shadow: ShadowOptimizer, held: Captured, ticket: Ticket | None) -> None:
        if ticket is not None:
            ticket.wait(self._context.config.save_timeout_s)
        shadow.add(held, held.block.unit.group)

    def _replay(self, shadow: ShadowOptimizer, entry: LogEntry, ticket: Ticket | None, buffers: list[Tensor]) -> None:
        try:
            if ticket is not None:
                ticket.wait(self._context.config.save_timeout_s)
            if self._error is not None:
                return
            start = self._context.clock()
            shadow.replay(entry)
            end = self._context.clock()
            self._context.timeline.add("replay", "update", start, end, step=self.target)
            self.stats.replay_s += end - start
            self.stats.replayed += 1
        finally:
            for buffer in buffers:
                self._context.staging.give(buffer)

    def _complete(self) -> None:
        self._wait_on_host()
        if self._error is not None:
            return
        self._settle_held()
        config = self._context.config
        self._audit = compare(self._samples, self._views, kind=config.audit, rtol=config.audit_rtol)
        self._samples, self._shadows = [], []

    def _settle_held(self) -> None:
        for held in self._held.values():
            unit = held.block.unit
            shadow = None if unit.is_static else self._shadows[unit.optimizer]
            if shadow is not None and held.pieces:
                shadow.settle(held)
            self._copier.publish(held)

    def _owned(self) -> set[tuple[str, torch.dtype, torch.Size]]:
        owned = [self._copier.owned(unit) for unit in self._optimized()]
        return {(name, tensor.dtype, tensor.shape) for tensors in owned for name, tensor in tensors.items()}

    def _optimized(self) -> list[Unit]:
        return [unit for unit in self.units if not unit.is_static]

    def _captured_units(self) -> list[Unit]:
        return list({block.unit: None for block in self._held if not block.unit.is_static})

    def _units_of(self, index: int) -> list[Unit]:
        return [unit for unit in self._captured_units() if unit.optimizer == index]


def _named(units: Sequence[Unit]) -> str:
    more = f" and {len(units) - 3} more" if len(units) > 3 else ""
    return ", ".join(unit.fqn for unit in units[:3]) + more
