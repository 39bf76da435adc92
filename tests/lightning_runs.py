"""A tiny module and real Trainers around it, shared by the tests of the Lightning adapter."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from torch.utils.data import DataLoader, Dataset

from ckpt_engine.restore.reader import load

BATCHES = 6
QUIET: dict[str, Any] = {
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "accelerator": "cpu",
    "num_sanity_val_steps": 0,
}


class Rows(Dataset[torch.Tensor]):
    """Rows that depend on their index alone; remembers which were asked for (in this process)."""

    def __init__(self, length: int = 4 * BATCHES) -> None:
        self.length = length
        self.seen: list[int] = []

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        self.seen.append(index)
        row = torch.randn(4, generator=torch.Generator().manual_seed(index))
        return torch.cat([row, torch.tensor([float(index)])])


class Tiny(L.LightningModule):
    """One hidden layer with dropout, Adam, a schedule by step; ``ids`` are the rows that it trained on."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(4, width), torch.nn.BatchNorm1d(width), torch.nn.Dropout(0.2), torch.nn.Linear(width, 1)
        )
        self.ids: list[list[int]] = []
        self.validations = 0

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.ids.append(batch[:, 4].int().tolist())
        loss: torch.Tensor = self.net(batch[:, :4]).pow(2).mean()
        self.log("train_loss", loss, on_step=True)
        # A metric that goes up and down, so that ranking has something to do.
        self.log("wave", torch.tensor(float((7 * self.global_step) % 5)))
        return loss

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.net(batch[:, :4]).pow(2).mean())
        self.log("val_wave", torch.tensor(float((7 * self.global_step) % 5)))

    def on_validation_end(self) -> None:
        self.validations += 1

    def test_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("test_loss", self.net(batch[:, :4]).pow(2).mean())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Stop(Callback):
    """Raises after a number of optimizer steps, as a crash in user code would."""

    def __init__(self, after: int) -> None:
        self.after = after

    def on_train_batch_end(self, trainer: L.Trainer, *rest: Any) -> None:
        if trainer.global_step == self.after:
            raise RuntimeError("stopped by the test")


def rows(**options: Any) -> DataLoader[torch.Tensor]:
    return DataLoader(Rows(), batch_size=4, **{"shuffle": True} | options)


def trainer(*callbacks: Callback, **options: Any) -> L.Trainer:
    return L.Trainer(callbacks=list(callbacks), **QUIET | {"max_epochs": 3} | options)


def fit(
    *callbacks: Callback,
    module: Tiny | None = None,
    loader: Any = None,
    ckpt_path: str | None = None,
    validate: bool = True,
    seed: int = 3,
    fit_options: Mapping[str, Any] | None = None,
    **options: Any,
) -> tuple[Tiny, L.Trainer]:
    """Seed, train, and return what was trained and by whom."""
    L.seed_everything(seed, verbose=False)
    module = module or Tiny()
    run = trainer(*callbacks, **options)
    held_out = DataLoader(Rows(8), batch_size=4) if validate else None
    run.fit(module, rows() if loader is None else loader, held_out, ckpt_path=ckpt_path, **(fit_options or {}))
    return module, run


def final(module: Tiny, run: L.Trainer) -> dict[str, Any]:
    """What must be equal for two runs to have been the same."""
    return {
        "model": module.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in run.optimizers],
        "schedulers": [config.scheduler.state_dict() for config in run.lr_scheduler_configs],
        "rng": torch.get_rng_state(),
        "step": run.global_step,
    }


def state_of(path: str | Path) -> dict[str, Any]:
    """The state dict that a checkpoint of ours holds."""
    state = load(str(path), weights_only=False).state
    assert isinstance(state, dict)
    return state


def names(folder: Path) -> list[str]:
    """What a directory holds, hidden entries included."""
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []
