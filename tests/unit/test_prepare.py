from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ckpt_engine.image.codec import decode
from ckpt_engine.prepare import fill, layout_of, own, prepare, split
from ckpt_engine.saves import Image
from ckpt_engine.windows import Windows
from tests.unit.windowing import Bench


class Setting(Bench):
    """A window at its target, and a state that it covers."""

    def __init__(self) -> None:
        super().__init__(warm=2)
        self.windows = Windows(self.config, self.pool, self.replay, self.persist, self.context.clock)
        self.windows.opener = self.opener
        self.windows.maybe_open(2, 2)
        self.direct: list[list[str]] = []

    def state(self) -> dict[str, Any]:
        weights = {**self.model.state_dict(), "base": self.base}
        return {"state_dict": weights, "optimizer_states": [self.optimizer.state_dict()], "note": torch.ones(2)}

    def prepare(self, state: Mapping[str, object], *, windowed: bool = True) -> Any:
        image = self.windows.seal(2) if windowed else None
        return prepare(
            state, image=image, names=self.opener.names(), copy_directly=self._copy, direct_mode="async"
        )

    def _copy(self, tensors: Mapping[str, Tensor]) -> Image:
        self.direct.append(list(tensors))
        return self.windows.copy_directly(tensors)


def test_a_covered_state_keeps_only_the_rest_beside_the_image() -> None:
    setting = Setting()
    prepared = setting.prepare(setting.state())
    assert prepared.image is setting.windows.image
    assert list(prepared.extras) == ["extra.note"]
    assert (prepared.mode, prepared.stale, setting.direct) == ("one_step", (), [])


def test_the_tree_and_the_tensors_give_the_state_back() -> None:
    setting = Setting()
    state = setting.state()
    prepared = setting.prepare(state, windowed=False)
    tensors = {**prepared.image.layout.views(prepared.image.arena.tensor), **prepared.extras}
    back = decode(prepared.tree, tensors)
    assert torch.equal(back["state_dict"]["0.weight"], setting.model[0].weight.detach())  # type: ignore[index,arg-type]
    assert prepared.mode == "async"
    assert all(name.startswith(("model.", "optim.")) for name in setting.direct[0])


def test_extras_are_copies() -> None:
    setting = Setting()
    state = setting.state()
    prepared = setting.prepare(state)
    state["note"].zero_()
    assert torch.equal(prepared.extras["extra.note"], torch.ones(2))


def test_weights_alone_do_not_take_the_optimizers_image() -> None:
    setting = Setting()
    prepared = setting.prepare({"state_dict": setting.model.state_dict()})
    assert prepared.image is not setting.windows.image
    assert all(name.startswith("model.") for name in setting.direct[0])


def test_a_state_of_other_tensors_is_copied() -> None:
    setting = Setting()
    prepared = setting.prepare({"state_dict": {"x": torch.ones(3)}})
    assert prepared.image is not setting.windows.image


def test_a_replaced_tensor_is_stale_and_the_state_is_copied() -> None:
    setting = Setting()
    state = setting.state()
    state["state_dict"]["base"] = torch.zeros(3000)
    prepared = setting.prepare(state)
    assert prepared.stale == ("model.base",)
    view = prepared.image.layout.views(prepared.image.arena.tensor)["model.base"]
    assert torch.equal(view, torch.zeros(3000))


def test_tensors_are_laid_out_filled_and_owned() -> None:
    tensors = {"model.a": torch.arange(6.0).view(2, 3).t(), "model.b": torch.tensor(3, dtype=torch.uint8)}
    layout = layout_of(tensors)
    memory = torch.zeros(layout.total_bytes, dtype=torch.uint8)
    fill(layout, memory, tensors)
    assert bytes(memory[: layout.data_start].numpy()) == layout.header
    assert all(torch.equal(view, tensors[name]) for name, view in layout.views(memory).items())
    assert own(tensors)["model.a"].data_ptr() != tensors["model.a"].data_ptr()


def test_only_model_and_optimizer_go_into_the_image() -> None:
    image, rest = split({name: torch.zeros(1) for name in ("model.a", "optim.a.x", "extra.b", "models.c")})
    assert (list(image), list(rest)) == (["model.a", "optim.a.x"], ["extra.b", "models.c"])
