from __future__ import annotations

import random

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from ckpt_engine.capture.audit import MAX_UNITS, RUN, Sample, compare, equals_live, take_samples
from ckpt_engine.capture.units import Unit


def _static(tensor: Tensor, name: str = "w") -> Unit:
    return Unit(fqn=name, tensor=tensor)


@given(st.integers(0, 300), st.integers(0, 100), st.booleans())
def test_samples_equal_the_row_major_elements_they_stand_for(rows: int, seed: int, turned: bool) -> None:
    tensor = torch.arange(rows * 3.0).view(rows, 3)
    tensor = tensor.t().contiguous().t() if turned else tensor
    for kind in ("sample", "full"):
        (sample,) = take_samples([_static(tensor)], [], kind=kind, seed=seed)
        wanted = tensor.reshape(-1)[sample.low : sample.low + sample.values.numel()]
        assert torch.equal(sample.values, wanted)
        assert sample.values.numel() == (tensor.numel() if kind == "full" else min(RUN, tensor.numel()))


def test_samples_are_copies_and_include_optimizer_state() -> None:
    weight = nn.Parameter(torch.ones(200))
    optimizer = torch.optim.AdamW([weight])
    weight.grad = torch.ones(200)
    optimizer.step()
    keys = ("step", "exp_avg", "exp_avg_sq")
    unit = Unit(fqn="w", tensor=weight, optimizer=0, group=0, state_keys=keys)
    samples = take_samples([unit], [optimizer], kind="sample", seed=1)
    assert [sample.name for sample in samples] == ["model.w", *(f"optim.w.{key}" for key in keys)]
    kept = [sample.values.clone() for sample in samples]
    optimizer.step()
    assert all(torch.equal(sample.values, old) for sample, old in zip(samples, kept, strict=True))


def test_a_large_model_is_sampled_and_the_global_stream_is_not_touched() -> None:
    units = [_static(torch.ones(2), str(i)) for i in range(MAX_UNITS + 50)]
    before = random.getstate()
    assert len(take_samples(units, [], kind="sample", seed=5)) == MAX_UNITS
    assert len(take_samples(units, [], kind="full", seed=5)) == len(units)
    assert take_samples(units, [], kind="off", seed=5) == []
    assert random.getstate() == before


def _compare(image: Tensor, live: Tensor, *, exact: bool = True, rtol: float = 1e-5):  # type: ignore[no-untyped-def]
    sample = Sample(name="w", low=0, values=live, exact=exact)
    return compare([sample], {"w": image}, kind="sample", rtol=rtol)


def test_equal_bits_pass_nan_included_and_signed_zero_is_a_difference() -> None:
    nan = torch.tensor([float("nan"), 1.0])
    assert _compare(nan, nan.clone()).to_dict()["result"] == "bit-exact"
    assert _compare(torch.tensor([0.0]), torch.tensor([-0.0])).different == 1


def test_one_ulp_fails_on_the_host_and_passes_for_an_accelerator() -> None:
    live = torch.ones(5)
    image = torch.nextafter(live, torch.tensor(2.0))
    failed = _compare(image, live)
    assert not failed.passed
    assert failed.failures == ("w",)
    tolerated = _compare(image, live, exact=False)
    assert tolerated.passed
    assert tolerated.to_dict()["result"] == "within tolerance"
    assert 0 < tolerated.max_relative < 1e-6


def test_a_nan_or_a_large_error_never_passes() -> None:
    live = torch.ones(3)
    assert not _compare(torch.tensor([1.0, float("nan"), 1.0]), live, exact=False).passed
    assert not _compare(live * 1.1, live, exact=False).passed
    assert not _compare(live, torch.zeros(3), exact=False).passed


def test_all_types_are_compared_by_bits() -> None:
    for dtype in (torch.float8_e4m3fn, torch.complex64, torch.bool, torch.int64, torch.bfloat16, torch.float64):
        live = torch.tensor([0.0, 1.0, 1.0]).to(dtype)
        assert _compare(live.clone(), live).passed
        assert _compare(torch.tensor([1.0, 1.0, 1.0]).to(dtype), live).different == 1


def test_equals_live_looks_at_every_pair() -> None:
    one = torch.randn(4, 5)
    assert equals_live([(one.clone(), one), (one.t().contiguous(), one.t())], rtol=0.0)
    assert not equals_live([(one.clone(), one), (one + 1, one)], rtol=0.0)
