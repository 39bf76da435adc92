from __future__ import annotations

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from ckpt_engine.capture.traits import traits_of
from ckpt_engine.capture.units import (
    LARGE_BUFFER,
    Unit,
    build_units,
    cut,
    image_specs,
    is_frozen,
    is_plain,
    state_tensors,
    view_key,
)


def _units(optimizers: list[torch.optim.Optimizer], tensors: dict[str, Tensor], **options: Any) -> dict[str, Unit]:
    traits = [traits_of(optimizer) for optimizer in optimizers]
    units = build_units(optimizers, traits, tensors, **{"block_bytes": 4096, **options})
    return {unit.fqn: unit for unit in units}


def _stepped(cls: Any, params: list[nn.Parameter], **options: Any) -> Any:
    optimizer = cls(params, lr=0.1, **options)
    for parameter in params:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


@given(st.integers(0, 5000), st.integers(1, 3000))
def test_cuts_cover_every_element_once_at_multiples_of_64(numel: int, granule: int) -> None:
    ranges = cut(numel, granule)
    assert [low for low, _ in ranges] == [0, *(high for _, high in ranges[:-1])]
    assert ranges[-1][1] == numel
    assert all(low % 64 == 0 for low, _ in ranges)
    assert all(high - low <= max(64, granule) for low, high in ranges)
    assert all(high > low for low, high in ranges) or numel == 0


@given(
    st.lists(st.lists(st.integers(0, 40), max_size=3), min_size=1, max_size=6),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
    st.sampled_from([torch.optim.AdamW, torch.optim.SGD, torch.optim.Adafactor]),
)
def test_blocks_hold_every_byte_of_the_image_once(shapes: list[list[int]], dtype: torch.dtype, cls: Any) -> None:
    params = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes]
    if cls is torch.optim.Adafactor:
        params = [p for p in params if p.numel()] or [nn.Parameter(torch.zeros(1, dtype=dtype))]
    optimizer = _stepped(cls, params)
    units = list(_units([optimizer], {f"p{i}": p for i, p in enumerate(params)}).values())
    covered = sum(block.nbytes for unit in units for block in unit.blocks)
    expected = sum(p.nbytes + sum(s.nbytes for s in state_tensors(optimizer, p).values()) for p in params)
    assert covered == expected
    assert image_specs(units, [optimizer])[0].name == "model.p0"
    for unit in units:
        assert unit.blocks[0].is_first
        assert unit.blocks[-1].high == unit.tensor.numel()


def test_tied_weights_are_one_unit_under_the_first_name() -> None:
    weight = nn.Parameter(torch.ones(4))
    units = _units([_stepped(torch.optim.SGD, [weight])], {"head": weight, "emb": weight})
    assert list(units) == ["head"]


def test_scalars_and_empty_tensors_have_one_block() -> None:
    scalar, empty = nn.Parameter(torch.tensor(1.0)), nn.Parameter(torch.empty(0, 3))
    units = _units([_stepped(torch.optim.AdamW, [scalar, empty])], {"s": scalar, "e": empty})
    assert [len(unit.blocks) for unit in units.values()] == [1, 1]
    assert units["s"].blocks[0].nbytes == 4 * 4
    assert units["e"].blocks[0].nbytes == 4


def test_a_tensor_whose_memory_is_not_contiguous_is_not_cut() -> None:
    turned = nn.Parameter(torch.randn(60, 70).t())
    units = _units([_stepped(torch.optim.AdamW, [turned])], {"t": turned})
    assert not units["t"].flat
    assert len(units["t"].blocks) == 1


def test_whole_tensor_optimizers_are_not_cut() -> None:
    weight = nn.Parameter(torch.randn(80, 80))
    assert len(_units([_stepped(torch.optim.Adafactor, [weight])], {"w": weight})["w"].blocks) == 1
    assert len(_units([_stepped(torch.optim.AdamW, [weight])], {"w": weight})["w"].blocks) > 1


def test_a_parameter_of_two_optimizers_is_direct() -> None:
    weight, other = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))
    optimizers = [_stepped(torch.optim.SGD, [weight, other]), _stepped(torch.optim.AdamW, [weight])]
    units = _units(optimizers, {"w": weight, "o": other})
    assert units["w"].direct
    assert not units["o"].direct


def test_frozen_parameters_and_large_buffers_are_static_and_small_buffers_are_none() -> None:
    trained, frozen = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4), requires_grad=False)
    held = nn.Parameter(torch.ones(4), requires_grad=False)
    optimizer = torch.optim.AdamW([trained, held])
    assert is_frozen(held, optimizer)
    large, small = torch.zeros(LARGE_BUFFER, dtype=torch.uint8), torch.zeros(3)
    units = _units([optimizer], {"w": trained, "f": frozen, "h": held, "large": large, "small": small})
    assert {name: unit.is_static for name, unit in units.items()} == {"w": False, "f": True, "h": True, "large": True}


def test_a_parameter_frozen_after_training_keeps_its_state_in_the_image() -> None:
    weight = nn.Parameter(torch.ones(4))
    optimizer = _stepped(torch.optim.AdamW, [weight])
    weight.requires_grad_(False)
    weight.grad = None
    unit = _units([optimizer], {"w": weight})["w"]
    assert not unit.is_static
    assert unit.state_keys == ("step", "exp_avg", "exp_avg_sq")


def test_weights_only_units_have_no_state_and_are_direct() -> None:
    weight = nn.Parameter(torch.ones(4))
    unit = _units([_stepped(torch.optim.AdamW, [weight])], {"w": weight}, params_only=True)["w"]
    assert (unit.state_keys, unit.direct) == ((), True)


def test_nested_state_cannot_be_replayed() -> None:
    weight = nn.Parameter(torch.ones(4))
    optimizer = _stepped(torch.optim.SGD, [weight])
    optimizer.state[weight]["history"] = [torch.ones(4)]
    assert _units([optimizer], {"w": weight})["w"].direct


def test_parameters_without_a_name_are_captured_all_the_same() -> None:
    weight = nn.Parameter(torch.ones(4))
    assert list(_units([_stepped(torch.optim.SGD, [weight])], {})) == ["__unnamed__.0.0.0"]


def test_only_ordinary_strided_tensors_are_plain() -> None:
    sparse = torch.eye(3).to_sparse()
    conjugated = torch.ones(2, dtype=torch.complex64).conj()
    assert is_plain(torch.ones(2))
    assert is_plain(nn.Parameter(torch.ones(2)))
    assert not any(map(is_plain, [sparse, conjugated, torch.empty(2, device="meta"), 3, None]))


def test_view_keys_tell_memory_shape_and_type_apart() -> None:
    base = torch.zeros(4, 4)
    assert view_key(base) == view_key(base.detach())
    assert len({view_key(t) for t in (base, base.t(), base[1:], base.view(16), base.view(torch.int32))}) == 5
