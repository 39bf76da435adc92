"""The shadow optimizer: the live optimizer's class, stepping over views of the host image.

Replaying the update that training ran, with the gradients and hyper-parameters that it used, brings a block that was
copied some steps ago to the target step (GoCkpt, section 4, step 4). The shadow has one parameter per captured piece;
pieces without a gradient in a step are left alone, exactly as the live optimizer leaves parameters without one.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ckpt_engine.capture.traits import Traits
from ckpt_engine.capture.units import Block, cut
from ckpt_engine.errors import ConfigError

CACHE_ELEMENTS = 256 * 1024
"""Elements per piece for the for-loop kernels: a piece with its state and gradient stays in cache."""

# What torch keeps on an instance and a shadow must not share: schedulers bind `step` to the live optimizer.
_OWN = frozenset({"state", "param_groups", "defaults", "step", "zero_grad", "grad_scale", "found_inf"})


@dataclass(kw_only=True, eq=False, slots=True)
class Captured:
    """A block's copy on the host: the memory that replay works on.

    Args:
        block: What was copied.
        parameter: Host memory of the parameter slice.
        state: Host memory of its state, by key; entries that are not cut have a copy of their own per piece.
        values: State entries that are no tensors.
        pieces: The shadow parameters made from it.
    """

    block: Block
    parameter: Tensor
    state: dict[str, Tensor]
    values: dict[str, object]
    pieces: list[tuple[Tensor, int, int]] = field(default_factory=list)


@dataclass(kw_only=True, eq=False, slots=True)
class LogEntry:
    """One applied update of one optimizer: all that its replay needs.

    Args:
        hyper: The parameter groups without their parameters, as this update used them.
        grads: Captured block and its gradient on the host (None: the parameter had no gradient).
        found_inf: The scaler's flag for fused optimizers; non-zero means that the kernel wrote nothing.
        grad_scale: The factor that a fused kernel divides the gradients by.
        autocast: The dtype of the autocast region that the update ran in; None where there was none.
    """

    hyper: list[dict[str, Any]]
    grads: list[tuple[Captured, Tensor | None]]
    found_inf: Tensor | None = None
    grad_scale: Tensor | None = None
    autocast: torch.dtype | None = None


def hyper_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Copy the hyper-parameters of every group, tensors included."""
    return [{key: _host(value) for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


def autocast_of(optimizer: Optimizer) -> torch.dtype | None:
    """The dtype of the autocast region around the caller, as far as it concerns the parameters of ``optimizer``.

    Manual optimization steps inside the region of the forward pass, where an update that multiplies matrices
    (Adafactor) does so in 16 bits. The region belongs to the thread, so a replay has to enter one of its own.
    """
    kinds = {p.device.type for group in optimizer.param_groups for p in group["params"][:1]}
    return next((torch.get_autocast_dtype(kind) for kind in kinds if torch.is_autocast_enabled(kind)), None)


def _host(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, (list, tuple)):
        return type(value)(_host(item) for item in value) if type(value) in (list, tuple) else value
    return value


class ShadowOptimizer:
    """Replays the updates of one live optimizer on captured blocks.

    Args:
        live: The optimizer that training steps.
        traits: What is known about it.

    Raises:
        ConfigError: The optimizer keeps something that a twin cannot have a copy of, so that a replay could reach
            into the live training.
    """

    def __init__(self, live: Optimizer, traits: Traits) -> None:
        self._traits = traits
        self._optimizer = _empty_twin(live, traits)
        step: Any = type(live).step
        # The undecorated step: the decorated one would run the user's global step hooks from a background thread.
        self._step = step.__wrapped__ if getattr(step, "hooked", False) else step

    def add(self, captured: Captured, group: int) -> None:
        """Make ``captured`` part of the following replays."""
        flat = captured.parameter
        spans = cut(flat.numel(), CACHE_ELEMENTS) if self._in_cache_pieces(flat) else [(0, flat.numel())]
        captured.pieces = []
        for low, high in spans:
            whole = low == 0 and high == flat.numel()
            piece = flat.detach() if whole else flat[low:high]
            self._optimizer.state[piece] = self._piece_state(captured, (low, high), whole)
            self._optimizer.param_groups[group]["params"].append(piece)
            captured.pieces.append((piece, low, high))

    def remove(self, captured: Captured) -> None:
        """Forget a block, so that it can be captured again."""
        gone = {id(piece) for piece, _, _ in captured.pieces}
        for group in self._optimizer.param_groups:
            group["params"] = [piece for piece in group["params"] if id(piece) not in gone]
        for piece, _, _ in captured.pieces:
            self._optimizer.state.pop(piece, None)
        captured.pieces = []

    def replay(self, entry: LogEntry) -> None:
        """Apply one logged update; a step that the scaler skipped changes nothing."""
        if entry.found_inf is not None and bool(entry.found_inf.item()):
            return
        for group, hyper in zip(self._optimizer.param_groups, entry.hyper, strict=True):
            group.update(self._as_run_here(hyper))
        self._scale(entry)
        pieces = [piece for captured, grad in entry.grads if grad is not None for piece in captured.pieces]
        try:
            for captured, grad in entry.grads:
                self._give(captured, grad)
            with torch.no_grad(), torch.autocast("cpu", entry.autocast, enabled=entry.autocast is not None):
                self._step(self._optimizer)
        finally:
            for piece, _, _ in pieces:
                piece.grad = None

    def settle(self, captured: Captured) -> None:
        """Write back state that the optimizer replaced by new tensors instead of updating it in place."""
        for piece, low, high in captured.pieces:
            state = self._optimizer.state[piece]
            for key, target in captured.state.items():
                value = state.get(key)
                if not isinstance(value, Tensor):
                    continue
                view = _piece_of(captured, target, low, high)
                if view is None:
                    if low == 0 and value.data_ptr() != target.data_ptr():
                        target.copy_(value)
                elif value.data_ptr() != view.data_ptr():
                    view.copy_(value)

    def _in_cache_pieces(self, flat: Tensor) -> bool:
        return self._traits.grain == "slice" and not self._traits.fused and flat.dim() == 1

    @staticmethod
    def _piece_state(captured: Captured, span: tuple[int, int], whole: bool) -> dict[str, Any]:
        state: dict[str, Any] = dict(captured.values)
        for key, value in captured.state.items():
            view = _piece_of(captured, value, *span)
            # Entries that are not cut (a step counter) are written by every piece's update: each has its own.
            state[key] = value if whole else value.clone() if view is None else view
        return state

    def _as_run_here(self, hyper: Mapping[str, Any]) -> dict[str, Any]:
        result = dict(hyper)
        if "capturable" in result:
            result["capturable"] = False
        if self._traits.loops_like_foreach and "foreach" in result and not result.get("fused"):
            result["foreach"] = False
        return result

    def _scale(self, entry: LogEntry) -> None:
        for name, value in (("grad_scale", entry.grad_scale), ("found_inf", entry.found_inf)):
            if value is not None:
                setattr(self._optimizer, name, value)
            elif hasattr(self._optimizer, name):
                delattr(self._optimizer, name)

    @staticmethod
    def _give(captured: Captured, grad: Tensor | None) -> None:
        for piece, low, high in captured.pieces:
            if grad is None:
                piece.grad = None
            else:
                piece.grad = grad if piece.numel() == grad.numel() else grad[low:high]


def _piece_of(captured: Captured, value: Tensor, low: int, high: int) -> Tensor | None:
    """The slice of a state tensor that belongs to a piece; None where the tensor is not cut."""
    if value.dim() == 0 or value.shape != captured.parameter.shape:
        return None
    if low == 0 and high == captured.parameter.numel():
        return value
    return value[low:high]


def _empty_twin(live: Optimizer, traits: Traits) -> Optimizer:
    """An instance of the same class with the same attributes and no parameters, made without its constructor."""
    twin: Optimizer = object.__new__(type(live))
    for key, value in vars(live).items():
        if key in _OWN or key.startswith("_optimizer_") or callable(value):
            continue
        try:
            twin.__dict__[key] = _detached(value)
        except TypeError as error:
            # Classes of torch read nothing but plain values: what else is there, somebody hung on the instance.
            if not traits.proven:
                raise ConfigError(
                    f"{type(live).__name__}.{key} holds {error}, of which a replay cannot have its own copy."
                ) from error
    for hooks in [key for key in vars(live) if key.startswith("_optimizer_")]:
        twin.__dict__[hooks] = OrderedDict()
    twin.__dict__["defaults"] = dict(live.defaults)
    twin.__dict__["state"] = defaultdict(dict)
    twin.__dict__["param_groups"] = [
        {**{key: _host(value) for key, value in group.items() if key != "params"}, "params": []}
        for group in live.param_groups
    ]
    return twin


def _detached(value: Any) -> Any:
    """Copy an attribute so that nothing of the live optimizer can be reached through it.

    Raises:
        TypeError: It is, or holds, a parameter, a generator or any other object with a life of its own.
    """
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes, torch.dtype, torch.device)):
        return value
    if isinstance(value, Tensor) and not isinstance(value, nn.Parameter) and not value.requires_grad:
        return _host(value)
    if type(value) in (list, tuple, set, frozenset):
        return type(value)(_detached(item) for item in value)
    if isinstance(value, dict):
        copied = {_detached(key): _detached(item) for key, item in value.items()}
        if type(value) is dict:
            return copied
        if type(value) is OrderedDict:
            return OrderedDict(copied)
        if type(value) is defaultdict:
            return defaultdict(value.default_factory, copied)
    raise TypeError(f"a {type(value).__name__}")


def working_copy(view: Tensor, live: Tensor) -> Tensor:
    """Memory for the host copy of ``live``: the image view itself, or scratch of the same strides.

    Kernels walk memory, not indices: a non-contiguous tensor replays bit for bit only in its own layout.
    """
    if live.is_contiguous():
        return view
    return dense_like(torch.empty(live.nbytes, dtype=torch.uint8), live)


def dense_like(buffer: Tensor, like: Tensor) -> Tensor:
    """View a byte buffer as a tensor shaped like ``like``, with its strides where they are dense."""
    flat = buffer[: like.nbytes].view(like.dtype)
    stride = like.stride()
    if torch.empty_like(like, device="meta").stride() != stride:
        return flat.view(like.shape)
    return flat.as_strided(tuple(like.shape), stride)
