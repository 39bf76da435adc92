from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckpt_engine.capture.units import view_key
from ckpt_engine.naming import Namer, name_of_path


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("state_dict.a.b", "model.a.b"),
        ("optimizer_states.1.state.0.exp_avg", "optim.1.state.0.exp_avg"),
        ("state_dictionary.a", "extra.state_dictionary.a"),
        ("rng.torch", "extra.rng.torch"),
    ],
)
def test_a_path_becomes_a_name(path: str, name: str) -> None:
    assert name_of_path(path) == name


def test_owned_tensors_have_the_images_name_wherever_they_appear() -> None:
    tensor = torch.ones(3)
    namer = Namer({view_key(tensor): "model.w"}, {})
    assert namer(tensor, "somewhere.else") == "model.w"
    assert namer(tensor.detach(), "again") == "model.w"
    assert namer.in_image == {"model.w"}


def test_known_tensors_are_named_but_not_in_the_image() -> None:
    buffer = torch.ones(3)
    namer = Namer({}, {view_key(buffer): "model.buffer"})
    assert namer(buffer, "x") == "model.buffer"
    assert namer.in_image == set()


def test_empty_tensors_share_no_memory_and_are_named_by_path() -> None:
    empty = torch.empty(0)
    namer = Namer({view_key(empty): "model.w"}, {})
    assert namer(empty, "state_dict.e") == "model.e"


def test_sparse_tensors_are_named_by_path() -> None:
    assert Namer({}, {})(torch.eye(2).to_sparse(), "state_dict.s") == "model.s"


@given(st.lists(st.sampled_from(["a", "state_dict.a", "model", "b"]), max_size=12))
def test_different_tensors_never_share_a_name(paths: list[str]) -> None:
    tensors = [torch.ones(2) for _ in paths]
    namer = Namer({}, {})
    names = [namer(tensor, path) for tensor, path in zip(tensors, paths, strict=True)]
    assert len(set(names)) == len(names)
    assert [namer(tensor, path) for tensor, path in zip(tensors, paths, strict=True)] == names


@pytest.mark.parametrize("averages_first", [True, False])
def test_a_name_stays_with_its_tensor_where_the_state_shows_another_in_its_place(averages_first: bool) -> None:
    """Averaged weights stand in ``state_dict``, and the model's own elsewhere: neither takes the other's place."""
    live, average = torch.ones(3), torch.zeros(3)
    namer = Namer({view_key(live): "model.w"}, {})
    visits = [(average, "state_dict.w"), (live, "current_model_state.w")]
    names = [namer(tensor, path) for tensor, path in (visits if averages_first else visits[::-1])]
    assert sorted(names) == ["model.w", "model.w~2"]
    assert namer(live, "current_model_state.w") == "model.w"
    assert (namer.in_image, namer.stale) == ({"model.w"}, ())


def test_a_name_whose_tensor_is_nowhere_in_the_state_is_stale() -> None:
    live, other = torch.ones(3), torch.zeros(3)
    namer = Namer({view_key(live): "model.w"}, {})
    namer(other, "state_dict.w")
    assert namer.stale == ("model.w",)
