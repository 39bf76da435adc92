"""Layouts that change and tensors of every kind: the right checkpoint, or none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.equivalence.hard_loop import Loop, adamw, mlp
from tests.equivalence.harness import differences, load_state


@pytest.mark.parametrize("moment", ["before", "inside", "after"])
@pytest.mark.parametrize("at", [3, 4, 5, 6, 7])
def test_parameters_that_join_an_optimizer(moment: str, at: int, tmp_path: Path, strict: None) -> None:
    model = mlp()
    late = list(model[4].parameters())  # type: ignore[index]
    early = [p for p in model.parameters() if all(p is not q for q in late)]
    optimizer = torch.optim.AdamW(early, lr=1e-2)
    loop = Loop(model, [optimizer])
    getattr(loop, moment)[at] = lambda: optimizer.add_param_group({"params": late, "lr": 3e-3})
    loop.run(tmp_path).finish(tmp_path)


@pytest.mark.parametrize("at", [3, 4, 5, 6, 7])
def test_parameters_that_leave_an_optimizer(at: int, tmp_path: Path, strict: None) -> None:
    model = mlp()
    optimizer = adamw(model)
    loop = Loop(model, [optimizer])

    def leave() -> None:
        gone = optimizer.param_groups[0]["params"].pop()
        optimizer.state.pop(gone, None)

    loop.before[at] = leave
    if at == 7:
        loop.run(tmp_path, steps=6, saves=(6,)).engine.settle()
    loop.run(tmp_path).finish(tmp_path)


def test_state_that_is_dropped_before_it_was_copied_costs_the_save(tmp_path: Path, quiet: None) -> None:
    model = mlp()
    optimizer = adamw(model)
    loop = Loop(model, [optimizer])
    loop.before[7] = optimizer.state.clear
    loop.run(tmp_path).engine.close(60)
    assert [(record.step, record.ok) for record in loop.engine.records] == [(6, False), (10, True)]
    assert "went away before they were copied" in loop.engine.records[0].error
    assert not (tmp_path / "step-6").exists()
    assert differences(load_state(f"{tmp_path}/step-10"), loop.truth["step-10"]) == []  # type: ignore[index]


def test_an_empty_group_that_joins(tmp_path: Path, strict: None) -> None:
    model = mlp()
    optimizer = adamw(model)
    loop = Loop(model, [optimizer])
    loop.before[5] = lambda: optimizer.param_groups.append({**optimizer.param_groups[0], "params": []})
    loop.run(tmp_path).finish(tmp_path)


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("at", [4, 5, 6, 7])
@pytest.mark.parametrize("kind", ["same", "turned", "bfloat16"])
def test_data_that_is_swapped(kind: str, at: int, moment: str, tmp_path: Path, quiet: None) -> None:
    model = mlp()
    loop = Loop(model, [torch.optim.SGD(model.parameters(), lr=1e-2)])
    weight = model[2].weight  # type: ignore[index]

    def swap() -> None:
        if kind == "same":
            weight.data = weight.data.clone() * 1.5
        elif kind == "turned":
            weight.data = weight.data.t().contiguous().t()
        else:
            for parameter in model.parameters():
                parameter.data = parameter.data.bfloat16()
            loop.inputs = lambda step: torch.ones(4, 8, dtype=torch.bfloat16) * step

    getattr(loop, moment)[at] = swap
    if (at, moment) == (7, "before"):
        loop.run(tmp_path, steps=6, saves=(6,)).engine.settle()
    loop.run(tmp_path).finish(tmp_path)


class Zoo(nn.Module):
    """Parameters and large buffers of unusual types."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.wave = nn.Parameter(torch.randn(8, 300, dtype=torch.complex64))
        self.wide = nn.Parameter(torch.randn(300, 8, dtype=torch.float64))
        large = torch.randn(1 << 20)
        self.register_buffer("eight", large.to(torch.float8_e4m3fn))
        self.register_buffer("eight_big", large.repeat(2).to(torch.float8_e5m2))
        self.register_buffer("wide_buffer", large[: 1 << 17].double())
        self.register_buffer("flags", large > 0)
        self.register_buffer("waves", torch.randn(1 << 17, dtype=torch.complex64))
        self.register_buffer("small", torch.tensor(3, dtype=torch.uint8))

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(torch.complex64) @ self.wave).abs().double() @ self.wide


@pytest.mark.parametrize("optimizer", ["AdamW", "SGD", "RMSprop", "Adagrad"])
def test_complex_and_wide_parameters_and_every_kind_of_buffer(optimizer: str, tmp_path: Path, strict: None) -> None:
    model = Zoo()
    loop = Loop(model, [getattr(torch.optim, optimizer)(model.parameters(), lr=1e-3)])
    loop.run(tmp_path).finish(tmp_path)


def test_two_optimizers_that_share_a_parameter(tmp_path: Path, quiet: None) -> None:
    model = mlp()
    params = list(model.parameters())
    loop = Loop(model, [torch.optim.AdamW(params[:4], lr=1e-2), torch.optim.SGD(params[2:], lr=1e-2, momentum=0.9)])
    loop.run(tmp_path).finish(tmp_path)


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
def test_parameters_on_overlapping_storage(optimizer: str, tmp_path: Path, quiet: None) -> None:
    torch.manual_seed(0)
    memory = torch.randn(2000)

    class Overlap(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Parameter(memory[:1500])
            self.b = nn.Parameter(memory[1000:])

        def forward(self, x: Tensor) -> Tensor:
            return x.sum() * self.a.sum() + self.b.pow(2)

    model = Overlap()
    loop = Loop(model, [getattr(torch.optim, optimizer)(model.parameters(), lr=1e-3)])
    loop.run(tmp_path).finish(tmp_path)


def test_a_flat_buffer_seen_as_many_parameters(tmp_path: Path, strict: None) -> None:
    torch.manual_seed(0)
    memory = torch.randn(3000)

    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ParameterList([nn.Parameter(memory[i * 1000 : (i + 1) * 1000]) for i in range(3)])

        def forward(self, x: Tensor) -> Tensor:
            return sum((x.mean() * p.pow(2)).sum() for p in self.parts)  # type: ignore[return-value]

    model = Flat()
    loop = Loop(model, [adamw(model)]).run(tmp_path).finish(tmp_path)
    assert all(record.window_steps == 4 and record.gradient_bytes for record in loop.engine.records)
