"""A damaged checkpoint is named, and the next candidate is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch.utils.data import DataLoader

from ckpt_engine.errors import CorruptCheckpointError, NoCheckpointError
from lightning_ckpt import OverlappedCheckpoint, OverlappedCheckpointIO
from lightning_ckpt.fallback import is_ours, load_whole
from tests.conftest import MakeCheckpoint
from tests.lightning_runs import Rows, fit


def damage(path: str | Path) -> None:
    image = Path(path) / "rank-00000.safetensors"
    data = bytearray(image.read_bytes())
    data[-1] ^= 1
    image.write_bytes(data)


def three(folder: Path, make_checkpoint: MakeCheckpoint) -> list[str]:
    return [
        make_checkpoint(str(folder / f"{step}.ckpt"), {"step": step, "w": torch.ones(64)}, step=step)
        for step in (1, 2, 3)
    ]


def test_a_whole_checkpoint_is_loaded_without_a_warning(
    tmp_path: Path, make_checkpoint: MakeCheckpoint, recwarn: pytest.WarningsRecorder
) -> None:
    first, second, _ = three(tmp_path, make_checkpoint)
    assert load_whole(first, [second])["step"] == 1
    assert not recwarn.list


def test_damaged_and_missing_ones_are_passed_over_by_name(tmp_path: Path, make_checkpoint: MakeCheckpoint) -> None:
    first, second, third = three(tmp_path, make_checkpoint)
    damage(third)
    (tmp_path / "2.ckpt" / "manifest.json").unlink()
    with pytest.warns(UserWarning, match="passed over|used instead") as caught:
        assert load_whole(third, [second, first])["step"] == 1
    said = [str(warning.message) for warning in caught]
    assert len(said) == 3
    assert third in said[0]
    assert "rank-00000.safetensors" in said[0]
    assert second in said[1]
    assert said[2] == f"{first} is used instead of {third}."


def test_when_none_is_whole_the_error_is_that_of_the_one_asked_for(
    tmp_path: Path, make_checkpoint: MakeCheckpoint
) -> None:
    first, second, _ = three(tmp_path, make_checkpoint)
    damage(first)
    damage(second)
    with pytest.warns(UserWarning, match="passed over"), pytest.raises(CorruptCheckpointError, match=r"1\.ckpt"):
        load_whole(first, [second])
    with pytest.raises(NoCheckpointError, match="nowhere"):
        load_whole(str(tmp_path / "nowhere.ckpt"))


def test_what_is_ours_is_told_from_what_is_not(tmp_path: Path, make_checkpoint: MakeCheckpoint) -> None:
    whole, partial, _ = three(tmp_path, make_checkpoint)
    (tmp_path / "2.ckpt" / "manifest.json").unlink()
    (tmp_path / "vanilla.ckpt").write_bytes(b"pickle")
    (tmp_path / "logs").mkdir()
    assert [is_ours(whole), is_ours(partial)] == [True, True]
    assert not any(is_ours(str(tmp_path / name)) for name in ("vanilla.ckpt", "logs", "missing"))


def test_an_unfinished_directory_is_refused_as_what_it_is(tmp_path: Path, make_checkpoint: MakeCheckpoint) -> None:
    path = three(tmp_path, make_checkpoint)[0]
    (tmp_path / "1.ckpt" / "manifest.json").unlink()
    with pytest.raises(NoCheckpointError, match=r"1\.ckpt"):
        OverlappedCheckpointIO().load_checkpoint(path)


@pytest.mark.parametrize("monitor", ["wave", None])
def test_the_word_best_passes_over_a_damaged_best_checkpoint(tmp_path: Path, monitor: str | None) -> None:
    callback = OverlappedCheckpoint(
        dirpath=tmp_path, monitor=monitor, every_n_train_steps=2, save_top_k=3 if monitor else -1
    )
    module, run = fit(callback, max_steps=8)
    # Loading restores the callback, so its idea of the best one goes back to what it was at that step.
    best, second = callback.best_model_path, str(tmp_path / "epoch=0-step=6.ckpt")
    if monitor:
        ranked = sorted(callback.best_k_models, key=lambda path: float(callback.best_k_models[path]))
        second = next(path for path in ranked if path != best)
    damage(best)
    with pytest.warns(UserWarning, match="is used instead of") as caught:
        run.validate(module, DataLoader(Rows(8), batch_size=4), ckpt_path="best", verbose=False)
    assert any(f"{second} is used instead of {best}" in str(warning.message) for warning in caught)


class Latest(TorchCheckpointIO):
    """An IO with a scheme of its own, and a default of its own for where tensors go."""

    def load_checkpoint(
        self, path: Any, map_location: Any = "mine", weights_only: bool | None = None
    ) -> dict[str, Any]:
        return {"path": path, "map_location": map_location, "weights_only": weights_only}


@pytest.mark.parametrize("url", ["store://latest", "http://127.0.0.1:9/model.ckpt"])
def test_a_url_that_only_the_wrapped_io_knows_reaches_it_untouched(url: str) -> None:
    found = OverlappedCheckpointIO(Latest()).load_checkpoint(url, weights_only=False)
    assert found == {"path": url, "map_location": "mine", "weights_only": False}
