from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from ckpt_engine.capture.snapshot import BlockCopier
from ckpt_engine.capture.traits import traits_of
from ckpt_engine.capture.units import Unit, build_units, image_specs
from ckpt_engine.image.layout import Layout


class Setting:
    """Parameters with state, an empty image, and a copier between them."""

    def __init__(self, params: list[nn.Parameter], cls: Any = torch.optim.AdamW, **options: Any) -> None:
        self.optimizer = cls(params, lr=0.1, **options)
        for p in params:
            p.grad = torch.randn(p.shape).to(p.dtype)
        self.optimizer.step()
        tensors = {f"p{i}": p for i, p in enumerate(params)}
        self.units = build_units([self.optimizer], [traits_of(self.optimizer)], tensors, block_bytes=4096)
        layout = Layout.build(image_specs(self.units, [self.optimizer]))
        self.views = layout.views(torch.zeros(layout.total_bytes, dtype=torch.uint8))
        self.copier = BlockCopier(self.views, [self.optimizer])

    def capture(self, unit: Unit) -> list[Any]:
        captured = []
        for block in unit.blocks:
            held, copies = self.copier.plan(block)
            for copy in copies:
                copy.dst.copy_(copy.src)
            captured.append(held)
        return captured


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 60), max_size=2), min_size=1, max_size=4),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.booleans(),
)
def test_captured_and_published_blocks_make_the_image(shapes: list[list[int]], dtype: torch.dtype, turn: bool) -> None:
    params = [torch.randn(shape).to(dtype) for shape in shapes]
    setting = Setting([nn.Parameter(p.t() if turn and p.dim() == 2 else p) for p in params])
    for unit in setting.units:
        for held in setting.capture(unit):
            setting.copier.publish(held)
        for name, live in setting.copier.owned(unit).items():
            assert torch.equal(setting.views[name], live.detach())


def test_contiguous_tensors_are_copied_straight_into_the_image() -> None:
    setting = Setting([nn.Parameter(torch.randn(100, 100))])
    (unit,) = setting.units
    assert len(unit.blocks) > 1
    held = setting.capture(unit)
    base = setting.views["model.p0"].data_ptr()
    assert [h.parameter.data_ptr() - base for h in held] == [4 * block.low for block in unit.blocks]
    # Only the step counter of each further block lies outside.
    assert setting.copier.scratch_bytes == 4 * (len(held) - 1)


def test_pairs_are_host_copies_and_live_tensors() -> None:
    setting = Setting([nn.Parameter(torch.randn(70, 50))])
    (unit,) = setting.units
    for held in setting.capture(unit):
        for host, live in setting.copier.pairs(held):
            assert torch.equal(host.reshape(-1), live.reshape(-1))


def test_state_that_the_layout_does_not_know_stays_outside() -> None:
    setting = Setting([nn.Parameter(torch.randn(50))])
    (unit,) = setting.units
    setting.optimizer.state[unit.tensor]["late"] = torch.full((50,), 7.0)
    (held,) = setting.capture(unit)
    assert torch.equal(held.state["late"], torch.full((50,), 7.0))
    assert "optim.p0.late" not in setting.copier.owned(unit)


@pytest.mark.parametrize("other", [torch.zeros(3), torch.zeros(50, dtype=torch.float64)])
def test_state_that_changed_its_form_is_no_longer_the_images(other: Tensor) -> None:
    setting = Setting([nn.Parameter(torch.randn(50))])
    (unit,) = setting.units
    setting.optimizer.state[unit.tensor]["exp_avg"] = other
    assert "optim.p0.exp_avg" not in setting.copier.owned(unit)
    setting.capture(unit)
    assert torch.equal(setting.views["optim.p0.exp_avg"], torch.zeros(50))


def test_values_that_are_no_tensors_go_along() -> None:
    setting = Setting([nn.Parameter(torch.randn(5))], torch.optim.SGD)
    (unit,) = setting.units
    setting.optimizer.state[unit.tensor]["count"] = 3
    assert setting.capture(unit)[0].values["count"] == 3
