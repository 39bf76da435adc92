"""The optimizer tap: the two moments of an update, on any ``torch.optim.Optimizer``.

``before_update`` fires when gradients are final and parameters are still unwritten; ``after_update`` fires when the
update was applied. Frameworks run forward, backward and clipping *inside* ``optimizer.step(closure)``, so a bare
step hook would fire before gradients exist: the tap wraps the closure instead. A step that a gradient scaler skips
calls no hook, unless the optimizer is fused: then the update kernel itself checks ``found_inf``.

Example:
    >>> import torch
    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> optimizer = torch.optim.SGD([weight], lr=0.5)
    >>> seen = []
    >>> tap = OptimizerTap(optimizer, lambda t: seen.append(weight.tolist()), lambda t: seen.append(weight.tolist()))
    >>> weight.grad = torch.ones(2)
    >>> optimizer.step()
    >>> seen
    [[1.0, 1.0], [0.5, 0.5]]
    >>> tap.remove()
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from ckpt_engine.errors import ConfigError


def unwrap(optimizer: object) -> Optimizer:
    """Return the torch optimizer inside framework wrappers (``_optimizer`` or ``optimizer`` attributes).

    Raises:
        ConfigError: There is no torch optimizer inside.
    """
    seen = optimizer
    for _ in range(8):
        inner = _inner(seen)
        if inner is None:
            break
        seen = inner
    if not isinstance(seen, Optimizer):
        raise ConfigError(f"{type(optimizer).__name__} holds no torch.optim.Optimizer: pass the inner optimizer.")
    return seen


def _inner(optimizer: object) -> object | None:
    # A wrapper either keeps the real one under `_optimizer`, or never ran Optimizer.__init__ and so has no hooks of
    # its own. A real optimizer that holds another (Lookahead and its kind) stays: its step is the one that counts.
    inner = getattr(optimizer, "_optimizer", None)
    if inner is None and "_optimizer_step_pre_hooks" not in getattr(optimizer, "__dict__", {}):
        inner = getattr(optimizer, "optimizer", None)
    return inner if inner is not optimizer else None


class OptimizerTap:
    """Calls ``before_update`` and ``after_update`` around each applied update of one optimizer.

    Attributes:
        closure_calls: How often the closure of the running step was called; above 1 the update cannot be replayed.
        muted: While True nothing is reported (state-dict calls may step the optimizer with zero gradients).
    """

    def __init__(
        self,
        optimizer: Optimizer,
        before_update: Callable[[OptimizerTap], None],
        after_update: Callable[[OptimizerTap], None],
    ) -> None:
        self.optimizer = unwrap(optimizer)
        self.closure_calls = 0
        self.muted = False
        self._before = before_update
        self._after = after_update
        self._depth = 0
        self._announced = False
        self._hooks = (
            self.optimizer.register_step_pre_hook(self._pre_hook),
            self.optimizer.register_step_post_hook(self._post_hook),
        )

    @property
    def updating(self) -> bool:
        """Whether the update has been announced and has not returned."""
        return self._depth > 0 and self._announced

    def remove(self) -> None:
        """Take the hooks off the optimizer."""
        for hook in self._hooks:
            hook.remove()

    def _pre_hook(self, _: Optimizer, args: Any, kwargs: Any) -> Any:
        # A subclass whose step() calls super().step() fires the hooks twice; only the outermost call counts.
        if self.muted:
            return None
        self._depth += 1
        if self._depth > 1:
            return None
        self.closure_calls, self._announced = 0, False
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            self._announce()
            return None
        wrapped = self._wrap(closure)
        if len(args) > 1:
            return (args[0], wrapped, *args[2:]), kwargs
        return args, {**kwargs, "closure": wrapped}

    def _wrap(self, closure: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            try:
                with torch.enable_grad():
                    result = closure(*args, **kwargs)
            except BaseException:
                self._depth = 0
                raise
            self.closure_calls += 1
            self._announce()
            return result

        return run

    def _announce(self) -> None:
        self._announced = True
        try:
            self._before(self)
        except BaseException:
            self._depth = 0
            raise

    def _post_hook(self, _: Optimizer, args: Any, kwargs: Any) -> None:
        if self.muted or self._depth == 0:
            return
        self._depth -= 1
        if self._depth == 0 and self._announced:
            self._announced = False
            self._after(self)

    def abandon(self) -> None:
        """Forget a step that raised between its two moments."""
        self._depth = 0
