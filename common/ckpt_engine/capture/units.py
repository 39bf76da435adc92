"""Units and blocks: what a window copies, and in which granules.

A *unit* is one tensor as training holds it: a parameter with its optimizer state, or a static tensor (a frozen
parameter, a large buffer). A *block* is a slice of a unit, the granule of transfer and replay (GoCkpt, section 4:
a parameter chunk followed by its optimizer chunk). Cuts fall on multiples of 64 elements, where every torch kernel,
vectorised or not, gives the same bits as on the whole tensor.

Example:
    >>> cut(1000, 256)
    [(0, 256), (256, 512), (512, 768), (768, 1000)]
    >>> cut(0, 256)
    [(0, 0)]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.optim import Optimizer

from ckpt_engine.capture.traits import Traits
from ckpt_engine.image.layout import TensorSpec

CUT = 64
LARGE_BUFFER = 1 << 20

ViewKey = tuple[int, int, tuple[int, ...], tuple[int, ...], torch.dtype]


def view_key(tensor: Tensor) -> ViewKey:
    """Identify the memory that a strided tensor shows: equal keys mean the same elements in the same order."""
    return (
        tensor.untyped_storage().data_ptr(),
        int(tensor.storage_offset()),
        tuple(tensor.shape),
        tuple(tensor.stride()),
        tensor.dtype,
    )


def is_plain(tensor: object) -> bool:
    """Whether a value is an ordinary strided tensor that can be viewed as bytes in place."""
    return (
        type(tensor) in (Tensor, torch.nn.Parameter)
        and isinstance(tensor, Tensor)
        and tensor.layout is torch.strided
        and not tensor.is_quantized
        and tensor.device.type != "meta"
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def cut(numel: int, granule: int) -> list[tuple[int, int]]:
    """Cut ``numel`` elements into ranges of at most ``granule`` elements, at multiples of 64."""
    step = max(CUT, granule // CUT * CUT)
    if numel <= step:
        return [(0, numel)]
    return [(low, min(low + step, numel)) for low in range(0, numel, step)]


@dataclass(kw_only=True, eq=False, slots=True)
class Unit:
    """One tensor with its optimizer state.

    Args:
        fqn: Fully qualified name of the tensor in the model's state dict.
        tensor: The live tensor.
        optimizer: Index of the optimizer that updates it, or -1 for a static tensor.
        group: Index of its parameter group.
        state_keys: Keys of the optimizer state tensors that are part of the image.
        direct: It cannot be replayed: copied only once the target state is reached.
        early: Something writes it during the forward pass, so it is copied while training waits at the target.
        flat: The tensor and its same-shaped state are contiguous, so blocks are slices of the flat memory.
    """

    fqn: str
    tensor: Tensor
    optimizer: int = -1
    group: int = -1
    state_keys: tuple[str, ...] = ()
    direct: bool = False
    early: bool = False
    flat: bool = True
    blocks: list[Block] = field(default_factory=list)

    @property
    def is_static(self) -> bool:
        """Whether no optimizer updates this tensor."""
        return self.optimizer < 0

    def name(self, key: str | None = None) -> str:
        """Name in the image of the tensor itself, or of one of its state tensors."""
        return f"model.{self.fqn}" if key is None else f"optim.{self.fqn}.{key}"


@dataclass(kw_only=True, eq=False, slots=True)
class Block:
    """Elements ``low:high`` of a unit's flat memory, with the same slice of its state; ``nbytes`` counts both."""

    unit: Unit
    low: int
    high: int
    nbytes: int

    @property
    def is_first(self) -> bool:
        """Whether this block carries the unit's state tensors that are not cut (step counters and the like)."""
        return self.low == 0

    @property
    def is_whole(self) -> bool:
        """Whether this block is the whole unit."""
        return self.low == 0 and self.high == self.unit.tensor.numel()


def state_tensors(optimizer: Optimizer, parameter: Tensor) -> dict[str, Tensor]:
    """Return the plain tensors in a parameter's optimizer state, by key, without creating an entry."""
    entry = optimizer.state.get(parameter)
    if not isinstance(entry, dict):
        return {}
    return {key: value for key, value in entry.items() if isinstance(key, str) and is_plain(value)}


def is_frozen(parameter: Tensor, optimizer: Optimizer) -> bool:
    """Whether an optimizer holds a parameter that it does not update: many loops hand over all of a model."""
    return not parameter.requires_grad and parameter.grad is None and not optimizer.state.get(parameter)


def is_sliced(unit: Unit, value: Tensor) -> bool:
    """Whether a tensor is cut when the unit is: the parameter itself, and state of its shape."""
    return value.dim() > 0 and value.shape == unit.tensor.shape


def build_units(
    optimizers: Sequence[Optimizer],
    traits: Sequence[Traits],
    tensors: Mapping[str, Tensor],
    *,
    block_bytes: int,
    params_only: bool = False,
) -> list[Unit]:
    """List the units of a training process, each with its blocks.

    Args:
        optimizers: The torch optimizers.
        traits: What is known about each of them.
        tensors: FQN to live parameter or buffer; tied names refer to one tensor, which is stored once.
        block_bytes: Size in bytes of a block of the parameter itself.
        params_only: Leave the optimizer state out (weights-only checkpoints): nothing is replayed then.

    Returns:
        Optimized units first, in the order of the optimizers' groups, then static tensors.
    """
    names = {id(tensor): fqn for fqn, tensor in reversed(list(tensors.items()))}
    units: dict[int, Unit] = {}
    for index, optimizer in enumerate(optimizers):
        for group_index, group in enumerate(optimizer.param_groups):
            for position, parameter in enumerate(group["params"]):
                if id(parameter) in units:
                    # Two optimizers write it in turns, so no one log of gradients describes it.
                    units[id(parameter)].direct = True
                    continue
                if not is_plain(parameter) or is_frozen(parameter, optimizer):
                    continue
                fqn = names.get(id(parameter), f"__unnamed__.{index}.{group_index}.{position}")
                units[id(parameter)] = _optimized(
                    fqn, parameter, optimizer, (index, group_index), traits[index], params_only
                )
    for tensor in tensors.values():
        if id(tensor) not in units and _is_static(tensor):
            units[id(tensor)] = Unit(fqn=names[id(tensor)], tensor=tensor, flat=tensor.is_contiguous())
    for unit in units.values():
        sliceable = unit.is_static or unit.direct or traits[unit.optimizer].grain == "slice"
        unit.blocks = _blocks(unit, optimizers, block_bytes if sliceable and unit.flat else None)
    return list(units.values())


def _is_static(tensor: Tensor) -> bool:
    # Small buffers change in every forward: they are cloned at the boundary with the rest of the small state.
    return is_plain(tensor) and (isinstance(tensor, torch.nn.Parameter) or tensor.nbytes >= LARGE_BUFFER)


def _optimized(
    fqn: str,
    parameter: Tensor,
    optimizer: Optimizer,
    place: tuple[int, int],
    traits: Traits,
    params_only: bool,
) -> Unit:
    state = {} if params_only else state_tensors(optimizer, parameter)
    entry = optimizer.state.get(parameter, {})
    nested = any(isinstance(value, (list, dict, tuple)) for value in entry.values())
    sliced = [value for value in state.values() if value.dim() > 0 and value.shape == parameter.shape]
    others = [value for value in state.values() if value.dim() > 0 and value.shape != parameter.shape]
    contiguous = all(value.is_contiguous() for value in (parameter, *sliced))
    flat = contiguous and not others and traits.grain != "whole"
    return Unit(
        fqn=fqn,
        tensor=parameter,
        optimizer=place[0],
        group=place[1],
        state_keys=tuple(state),
        direct=params_only or traits.grain == "never" or nested,
        flat=flat,
    )


def _blocks(unit: Unit, optimizers: Sequence[Optimizer], block_bytes: int | None) -> list[Block]:
    numel = unit.tensor.numel()
    state = {} if unit.is_static else state_tensors(optimizers[unit.optimizer], unit.tensor)
    kept = [state[key] for key in unit.state_keys]
    per_element = unit.tensor.element_size() + sum(v.element_size() for v in kept if is_sliced(unit, v))
    fixed = sum(v.nbytes for v in kept if not is_sliced(unit, v))
    ranges = [(0, numel)] if block_bytes is None else cut(numel, block_bytes // unit.tensor.element_size())
    return [
        Block(unit=unit, low=low, high=high, nbytes=(high - low) * per_element + (fixed if low == 0 else 0))
        for low, high in ranges
    ]


def image_specs(units: Sequence[Unit], optimizers: Sequence[Optimizer]) -> list[TensorSpec]:
    """List the tensors of the image, in the order of the units."""
    specs = []
    for unit in units:
        specs.append(TensorSpec(unit.name(), unit.tensor.dtype, tuple(unit.tensor.shape)))
        if not unit.is_static:
            state = state_tensors(optimizers[unit.optimizer], unit.tensor)
            specs += [TensorSpec(unit.name(key), state[key].dtype, tuple(state[key].shape)) for key in unit.state_keys]
    return specs
