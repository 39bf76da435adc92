"""Loading a model without a Trainer, from our directories and from single files."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from ckpt_engine.errors import CheckpointError, CorruptCheckpointError
from ckpt_engine.restore.reader import load
from lightning_ckpt import OverlappedCheckpoint, load_from_checkpoint
from tests.equivalence.harness import differences
from tests.lightning_runs import Tiny, fit


class Recipe:
    """A class of the user's among the hyper-parameters."""

    def __init__(self, name: str) -> None:
        self.name = name


class WithRecipe(Tiny):
    def __init__(self, recipe: Any = None) -> None:
        super().__init__()
        self.save_hyperparameters()


def trained(folder: Path, callback: type[ModelCheckpoint], module: Tiny) -> str:
    fit(callback(dirpath=folder, every_n_train_steps=2, filename="{step}"), module=module, max_steps=2)
    return str(folder / "step=2.ckpt")


@pytest.mark.parametrize("kind", [OverlappedCheckpoint, ModelCheckpoint], ids=["ours", "vanilla"])
def test_weights_and_hyper_parameters_come_back(tmp_path: Path, kind: type[ModelCheckpoint]) -> None:
    module = Tiny(width=5)
    again = load_from_checkpoint(Tiny, trained(tmp_path, kind, module))
    assert again.hparams["width"] == 5
    assert differences(dict(again.state_dict()), dict(module.state_dict())) == []
    assert again.net(torch.ones(2, 4)).shape == (2, 1)


def test_arguments_override_saved_hyper_parameters(tmp_path: Path) -> None:
    path = trained(tmp_path, OverlappedCheckpoint, Tiny(width=5))
    with pytest.raises(RuntimeError, match="size mismatch"):
        load_from_checkpoint(Tiny, path, width=6)


def test_a_strict_load_names_keys_that_do_not_match_and_a_lax_one_takes_the_rest(tmp_path: Path) -> None:
    class More(Tiny):
        def __init__(self, width: int = 8) -> None:
            super().__init__(width)
            self.more = torch.nn.Linear(1, 1)

    path = trained(tmp_path, OverlappedCheckpoint, Tiny())
    with pytest.raises(RuntimeError, match=r"more\.weight"):
        load_from_checkpoint(More, path)
    assert load_from_checkpoint(More, path, strict=False).net[0].weight.shape == (8, 4)


def test_the_way_to_load_a_model_by_hand_works_too(tmp_path: Path) -> None:
    module = Tiny()
    path = trained(tmp_path, OverlappedCheckpoint, module)
    state: Any = load(path).state
    again = Tiny()
    again.load_state_dict(state["state_dict"])
    assert differences(dict(again.state_dict()), dict(module.state_dict())) == []


def test_custom_objects_are_refused_unless_asked_for(tmp_path: Path) -> None:
    path = trained(tmp_path, OverlappedCheckpoint, WithRecipe(Recipe("slow")))
    with pytest.raises(CheckpointError, match="Recipe"):
        load_from_checkpoint(WithRecipe, path)
    assert load_from_checkpoint(WithRecipe, path, weights_only=False).hparams["recipe"].name == "slow"


def test_custom_objects_in_a_vanilla_file_are_refused_unless_asked_for(tmp_path: Path) -> None:
    path = trained(tmp_path, ModelCheckpoint, WithRecipe(Recipe("slow")))
    with pytest.raises(pickle.UnpicklingError, match="Recipe"):
        load_from_checkpoint(WithRecipe, path)
    assert load_from_checkpoint(WithRecipe, path, weights_only=False).hparams["recipe"].name == "slow"


def test_a_damaged_checkpoint_is_refused_by_name(tmp_path: Path) -> None:
    path = trained(tmp_path, OverlappedCheckpoint, Tiny())
    image = Path(path, "rank-00000.safetensors")
    data = bytearray(image.read_bytes())
    data[-5] ^= 1
    image.write_bytes(data)
    with pytest.raises(CorruptCheckpointError, match=r"rank-00000\.safetensors"):
        load_from_checkpoint(Tiny, path)
