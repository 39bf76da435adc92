"""Everything in Lightning that saves or loads a path works on our checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO

from ckpt_engine.errors import CheckpointError, CorruptCheckpointError, SaveFailedError
from ckpt_engine.restore.catalog import is_checkpoint
from lightning_ckpt import OverlappedCheckpoint, OverlappedCheckpointIO
from tests.equivalence.harness import differences
from tests.lightning_runs import Tiny, final, fit, names, rows, trainer


class Note:
    """An object that only pickle can restore."""

    def __init__(self, text: str) -> None:
        self.text = text


class WithNote(Tiny):
    def __init__(self, note: Any = None) -> None:
        super().__init__()
        self.save_hyperparameters()


def test_saving_is_durable_when_the_call_returns(tmp_path: Path) -> None:
    io = OverlappedCheckpointIO()
    path = str(tmp_path / "a.ckpt")
    io.save_checkpoint({"state_dict": {"w": torch.arange(5)}, "global_step": 3}, path)
    assert is_checkpoint(path)
    assert torch.equal(io.load_checkpoint(path)["state_dict"]["w"], torch.arange(5))
    assert torch.equal(io.load_checkpoint(path + "/manifest.json")["state_dict"]["w"], torch.arange(5))
    io.teardown()


def test_other_paths_are_left_to_the_wrapped_io(tmp_path: Path) -> None:
    plain, io = TorchCheckpointIO(), OverlappedCheckpointIO()
    plain.save_checkpoint({"a": 1}, tmp_path / "vanilla.ckpt")
    assert io.load_checkpoint(tmp_path / "vanilla.ckpt") == {"a": 1}
    with pytest.raises(FileNotFoundError):
        io.load_checkpoint(tmp_path / "nothing.ckpt")
    io.teardown()


def test_removing_takes_ours_and_single_files(tmp_path: Path) -> None:
    io = OverlappedCheckpointIO()
    io.save_checkpoint({"a": 1}, tmp_path / "a.ckpt")
    (tmp_path / "b.ckpt").write_bytes(b"b")
    io.remove_checkpoint(tmp_path / "a.ckpt")
    io.remove_checkpoint(str(tmp_path / "b.ckpt"))
    io.teardown()
    assert names(tmp_path) == []


def test_a_save_that_fails_raises_and_leaves_what_was_there(tmp_path: Path) -> None:
    io = OverlappedCheckpointIO()
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(SaveFailedError):
        io.save_checkpoint({"a": 1}, tmp_path / "file" / "a.ckpt")
    io.save_checkpoint({"a": 2}, tmp_path / "a.ckpt")
    assert io.load_checkpoint(tmp_path / "a.ckpt") == {"a": 2}
    io.teardown()


@pytest.mark.parametrize(("weights_only", "loads"), [(None, False), (True, False), (False, True)])
def test_objects_that_need_pickle_load_only_when_asked_for(
    tmp_path: Path, weights_only: bool | None, loads: bool
) -> None:
    fit(OverlappedCheckpoint(dirpath=tmp_path, save_last=True), module=WithNote(Note("x")), max_steps=1)
    path = str(tmp_path / "last.ckpt")
    again: Any = {"module": WithNote(), "ckpt_path": path, "max_steps": 2}
    callback = OverlappedCheckpoint(dirpath=tmp_path / "b")
    if loads:
        _, run = fit(callback, fit_options={"weights_only": weights_only}, **again)
        assert run.global_step == 2
    else:
        with pytest.raises(CheckpointError, match="Note"):
            fit(callback, fit_options={"weights_only": weights_only}, **again)


def test_a_trainer_saves_and_loads_any_path_it_is_given(tmp_path: Path) -> None:
    module, run = fit(OverlappedCheckpoint(dirpath=tmp_path / "c"), max_steps=4)
    path = str(tmp_path / "by hand.ckpt")
    run.save_checkpoint(path)
    assert is_checkpoint(path)
    weights = str(tmp_path / "weights.ckpt")
    run.save_checkpoint(weights, weights_only=True)
    for each in (path, weights):
        other = Tiny()
        trainer(OverlappedCheckpoint(dirpath=tmp_path / "d")).validate(other, rows(), ckpt_path=each, verbose=False)
        assert differences(dict(other.state_dict()), dict(module.state_dict())) == []
    _, resumed = fit(OverlappedCheckpoint(dirpath=tmp_path / "e"), max_steps=5, ckpt_path=path)
    assert resumed.global_step == 5


def test_a_save_by_hand_within_a_step_hook_lands_in_order(tmp_path: Path) -> None:
    class ByHand(Tiny):
        def on_train_batch_end(self, *_: Any) -> None:
            if self.trainer.global_step in (2, 3):
                self.trainer.save_checkpoint(tmp_path / "hand.ckpt")

    callback = OverlappedCheckpoint(
        dirpath=tmp_path / "c", every_n_train_steps=1, save_top_k=-1, capture="multi_step", window_steps=3
    )
    L.seed_everything(1, verbose=False)
    first, second = ByHand(), Tiny()
    second.load_state_dict(first.state_dict())
    whole = fit(callback, module=first, max_steps=6)
    plain = fit(OverlappedCheckpoint(dirpath=tmp_path / "d", every_n_train_steps=1), module=second, max_steps=6)
    assert len(names(tmp_path / "c")) == 6
    assert is_checkpoint(str(tmp_path / "hand.ckpt"))
    assert differences(final(*whole), final(*plain)) == []


@pytest.mark.parametrize("word", ["best", "last"])
def test_the_words_best_and_last_find_ours(tmp_path: Path, word: str) -> None:
    callback = OverlappedCheckpoint(dirpath=tmp_path, monitor="wave", every_n_train_steps=1, save_last=True)
    module, run = fit(callback, max_steps=4)
    for entry in (run.validate, run.test):
        assert entry(module, rows(shuffle=False), ckpt_path=word, verbose=False)
    expected = callback.best_model_path if word == "best" else callback.last_model_path
    assert Path(expected).is_dir()
    assert run.ckpt_path is None or str(run.ckpt_path).startswith(expected)


def test_last_finds_the_newest_without_a_file_called_last(tmp_path: Path) -> None:
    options: Any = {"dirpath": tmp_path, "every_n_train_steps": 1, "save_top_k": -1}
    fit(OverlappedCheckpoint(**options), max_steps=4)
    _, run = fit(OverlappedCheckpoint(**options), max_steps=5, ckpt_path="last")
    assert run.global_step == 5
    assert "step=4.ckpt" in str(run.ckpt_path) or run.ckpt_path is None


def test_last_without_any_checkpoint_starts_anew(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="No checkpoint will be loaded"):
        _, run = fit(OverlappedCheckpoint(dirpath=tmp_path), max_steps=1, ckpt_path="last")
    assert run.global_step == 1


def test_last_passes_over_a_damaged_checkpoint_and_says_which(tmp_path: Path) -> None:
    options: Any = {"dirpath": tmp_path, "every_n_train_steps": 1, "save_top_k": -1, "filename": "{step}"}
    fit(OverlappedCheckpoint(**options), max_steps=4)
    image = tmp_path / "step=4.ckpt" / "rank-00000.safetensors"
    data = bytearray(image.read_bytes())
    data[-3] ^= 16
    image.write_bytes(data)

    class Where(ModelCheckpoint):
        start = -1

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            self.start = trainer.global_step

    where = Where(dirpath=tmp_path / "other", save_top_k=0)
    with pytest.warns(UserWarning, match=r"step=4\.ckpt"):
        fit(OverlappedCheckpoint(**options), where, max_steps=6, ckpt_path="last")
    assert where.start == 3


def test_a_damaged_checkpoint_named_by_path_is_refused(tmp_path: Path) -> None:
    fit(OverlappedCheckpoint(dirpath=tmp_path, filename="a"), max_steps=1)
    (tmp_path / "a.ckpt" / "rank-00000.json").unlink()
    with pytest.raises(CorruptCheckpointError, match=r"rank-00000\.json"):
        fit(OverlappedCheckpoint(dirpath=tmp_path / "b"), max_steps=2, ckpt_path=str(tmp_path / "a.ckpt"))


@pytest.mark.parametrize("word", ["hpc", None])
def test_a_checkpoint_of_a_requeued_job_is_found(tmp_path: Path, word: str | None) -> None:
    _, run = fit(OverlappedCheckpoint(dirpath=tmp_path / "c"), max_steps=3, default_root_dir=tmp_path)
    run.save_checkpoint(run._checkpoint_connector.hpc_save_path(str(tmp_path)))
    assert is_checkpoint(str(tmp_path / "hpc_ckpt_1.ckpt"))
    _, resumed = fit(
        OverlappedCheckpoint(dirpath=tmp_path / "d"), max_steps=4, ckpt_path=word, default_root_dir=tmp_path
    )
    assert resumed.global_step == 4
    assert resumed._checkpoint_connector.hpc_save_path(str(tmp_path)).endswith("hpc_ckpt_2.ckpt")


def test_a_plain_model_checkpoint_writes_our_format_beside_our_callback(tmp_path: Path) -> None:
    plain = ModelCheckpoint(dirpath=tmp_path / "plain", every_n_train_steps=2, save_top_k=1, filename="{step}")
    ours = OverlappedCheckpoint(
        dirpath=tmp_path / "ours", every_n_train_steps=3, save_top_k=-1, capture="multi_step", window_steps=2
    )
    fit(ours, plain, max_steps=6)
    assert names(tmp_path / "plain") == ["step=6.ckpt"]
    assert is_checkpoint(str(tmp_path / "plain" / "step=6.ckpt"))
    assert len(names(tmp_path / "ours")) == 2


def test_checkpoints_can_live_at_a_url() -> None:
    folder = "memory://overlap-test/run"
    options: Any = {"dirpath": folder, "every_n_train_steps": 1, "save_top_k": 2, "monitor": "wave", "save_last": True}
    callback = OverlappedCheckpoint(**options)
    module, _ = fit(callback, max_steps=3)
    assert is_checkpoint(callback.best_model_path)
    assert is_checkpoint(callback.last_model_path)
    assert len(callback.best_k_models) == 2
    for path in (callback.last_model_path, "last"):
        other, run = fit(OverlappedCheckpoint(**options), max_steps=3, ckpt_path=path)
        assert run.global_step == 3
        assert differences(dict(other.state_dict()), dict(module.state_dict())) == []
