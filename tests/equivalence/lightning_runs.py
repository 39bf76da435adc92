"""Real Trainers around an awkward module: how the runs of the Lightning equivalence tests are made and compared.

The module has dropout, batch norm, tied weights, a frozen and an unused parameter, and a buffer that follows the
weights in ``on_train_batch_end``, which Lightning calls *after* every callback's.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

from ckpt_engine.capture.rng import rng_state
from ckpt_engine.config import CheckpointConfig
from ckpt_engine.restore.catalog import scan
from lightning_ckpt import OverlappedCheckpoint
from tests.equivalence.harness import load_state

BATCH = 4
WIDTH = 12
INFINITE = (2, 6, 10, 18)
"""Steps whose 16-bit gradients overflow: each lies inside a window of the runs below."""
CARRIED = "overlap_ckpt"


class Rows(Dataset[tuple[int, Tensor]]):
    """Rows that depend on their index alone; ``seen`` are those that were asked for in this process."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.seen: list[int] = []

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[int, Tensor]:
        self.seen.append(index)
        return index, torch.randn(WIDTH, generator=torch.Generator().manual_seed(index))


@dataclass(frozen=True, kw_only=True)
class Case:
    """One way to train under Lightning.

    Args:
        optimizer: Class in ``torch.optim``.
        options: Its arguments.
        precision: Lightning's ``precision``; "16-mixed" with a real scaler on the CPU.
        clip: none, norm or value.
        accumulate: Micro-batches a step.
        style: automatic, manual, or two (optimizers, manual).
        scheduler: none, cosine (by step), epoch (StepLR), plateau-val or plateau-train.
        loader: plain, workers or stateful.
        estimate: ``configure_optimizers`` asks the trainer for ``estimated_stepping_batches``.
    """

    optimizer: str = "AdamW"
    options: dict[str, Any] = field(default_factory=dict)
    precision: str = "32-true"
    clip: str = "none"
    accumulate: int = 1
    style: str = "automatic"
    scheduler: str = "cosine"
    loader: str = "plain"
    estimate: bool = False

    @property
    def title(self) -> str:
        flags = "".join(f",{k}={v}" for k, v in self.options.items())
        parts = (self.precision, f"clip_{self.clip}", f"acc{self.accumulate}", self.style, self.scheduler, self.loader)
        return f"{self.optimizer}{flags}-{'-'.join(parts)}{'-estimate' if self.estimate else ''}"

    @property
    def batches(self) -> int:
        """Batches of an epoch; with accumulation the last group is a short one."""
        return 8 if self.accumulate == 1 else 11

    @property
    def rounds(self) -> int:
        """Optimizer rounds of an epoch."""
        return -(-self.batches // self.accumulate)

    @property
    def stride(self) -> int:
        """How much ``global_step`` grows in a round."""
        return 2 if self.style == "two" else 1

    @property
    def every(self) -> int:
        """``every_n_train_steps``: twice an epoch, so that one save is in its middle and one at its end."""
        return self.rounds * self.stride // 2


class Awkward(L.LightningModule):
    """A small classifier of row indices with everything that has broken a checkpointer."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case
        self.automatic_optimization = case.style == "automatic"
        self.inp = nn.Linear(WIDTH, 48)
        self.norm = nn.BatchNorm1d(48)
        self.drop = nn.Dropout(0.2)
        self.mid = nn.Linear(48, 24)
        self.emb = nn.Embedding(64, 24)
        self.head = nn.Linear(24, 64, bias=False)
        self.head.weight = self.emb.weight
        self.frozen = nn.Parameter(torch.randn(5, 3), requires_grad=False)
        self.unused = nn.Parameter(torch.randn(7))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("average", torch.zeros(24, 48))
        self.ids: list[list[int]] = []
        self.on_batch: Callable[[Awkward, int], None] | None = None

    def forward(self, ids: Tensor, rows: Tensor) -> Tensor:
        hidden = self.drop(torch.relu(self.norm(self.inp(rows))))
        logits = self.head(self.mid(hidden) * self.scale + 0.1 * self.emb(ids))
        return nn.functional.cross_entropy(logits.float(), ids)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor | None:
        if self.on_batch is not None:
            self.on_batch(self, batch_idx)
        self.ids.append(batch[0].tolist())
        loss = self(*batch)
        self.log("train_loss", loss.detach(), on_step=False, on_epoch=True)
        # The scaler counts steps too, so that overflow follows the step and not how often a closure is called.
        if self.case.precision == "16-mixed" and self.global_step // self.case.stride in INFINITE:
            loss = loss * float("inf")
        if self.automatic_optimization:
            return loss
        self._manual(loss, batch_idx)
        return None

    def _manual(self, loss: Tensor, batch_idx: int) -> None:
        optimizers = cast(Sequence[Any], self.optimizers(use_pl_optimizer=True))
        optimizers = optimizers if isinstance(optimizers, list) else [optimizers]
        accumulate = self.case.accumulate
        if batch_idx % accumulate == 0:
            for optimizer in optimizers:
                optimizer.zero_grad()
        self.manual_backward(loss / accumulate)
        if (batch_idx + 1) % accumulate and batch_idx + 1 < self.case.batches:
            return
        for optimizer in optimizers:
            if self.case.clip != "none":
                self.clip_gradients(optimizer, **CLIPS[self.case.clip])
            optimizer.step()
        schedulers = self.lr_schedulers()
        for scheduler in schedulers if isinstance(schedulers, list) else [schedulers]:
            if scheduler is not None:
                scheduler.step()  # type: ignore[call-arg]

    def on_train_batch_end(self, *rest: Any) -> None:
        with torch.no_grad():
            self.average.mul_(0.9).add_(self.mid.weight.float(), alpha=0.1)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self(*batch))

    def configure_optimizers(self) -> Any:
        if self.case.estimate:
            assert self.trainer.estimated_stepping_batches > 0
        parameters = list(self.parameters())
        halves = [parameters[::2], parameters[1::2]] if self.case.style == "two" else [parameters]
        made = [self._optimizer(half) for half in halves]
        return made, [s for s in map(self._scheduler, made) if s is not None]

    def _optimizer(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        cls = getattr(torch.optim, self.case.optimizer)
        groups: list[Any] = [
            {"params": [p for p in parameters if p.ndim > 1]},
            {"params": [p for p in parameters if p.ndim <= 1], "lr": 2e-3},
        ]
        if self.case.optimizer == "LBFGS":
            groups = parameters
        optimizer: torch.optim.Optimizer = cls(groups, **{"lr": 1e-2} | self.case.options)
        return optimizer

    def _scheduler(self, optimizer: torch.optim.Optimizer) -> dict[str, Any] | None:
        schedulers = torch.optim.lr_scheduler
        kind = self.case.scheduler
        if kind == "cosine":
            return {"scheduler": schedulers.CosineAnnealingLR(optimizer, 20), "interval": "step"}
        if kind == "epoch":
            return {"scheduler": schedulers.StepLR(optimizer, 1, gamma=0.5), "interval": "epoch"}
        if kind.startswith("plateau"):
            # So demanding that it lowers the rate after every epoch but the first.
            plateau = schedulers.ReduceLROnPlateau(optimizer, patience=0, factor=0.5, threshold=0.9)
            return {"scheduler": plateau, "monitor": "val_loss" if kind == "plateau-val" else "train_loss"}
        return None


CLIPS: dict[str, dict[str, Any]] = {
    "norm": {"gradient_clip_val": 0.3, "gradient_clip_algorithm": "norm"},
    "value": {"gradient_clip_val": 0.02, "gradient_clip_algorithm": "value"},
}
QUIET: dict[str, Any] = {
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "accelerator": "cpu",
    "num_sanity_val_steps": 0,
}


@dataclass(kw_only=True)
class Outcome:
    """A run that has ended: what it was, and its state at that moment."""

    module: Awkward
    trainer: L.Trainer
    callback: OverlappedCheckpoint
    seen: list[int]
    state: dict[str, Any]

    @property
    def ids(self) -> list[list[int]]:
        return self.module.ids


def saver(folder: Path, capture: str = "multi_step", **options: Any) -> OverlappedCheckpoint:
    """The callback under test: tiny blocks, so that every tensor is cut; a full audit, so that nothing hides.

    Steps of this toy are faster than the disk: there is an image for every save, so that each gets its whole window.
    """
    window = 3 if capture == "multi_step" else None
    config = CheckpointConfig(mode=capture, window_steps=window, block_bytes=4096, audit="full", max_images=8)  # type: ignore[arg-type]
    return OverlappedCheckpoint(dirpath=folder, config=config, **{"save_top_k": -1} | options)


def make_trainer(case: Case, *callbacks: Callback, **options: Any) -> L.Trainer:
    settings: dict[str, Any] = QUIET | {"max_epochs": 3}
    if case.style == "automatic":
        settings |= CLIPS.get(case.clip, {}) | {"accumulate_grad_batches": case.accumulate}
    if case.precision == "16-mixed":
        # Lightning replaces 16-mixed by bf16-mixed on the CPU unless it is given the plugin.
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=5)
        settings["plugins"] = [MixedPrecision("16-mixed", "cpu", scaler)]
    else:
        settings["precision"] = case.precision
    return L.Trainer(callbacks=list(callbacks), **settings | options)


def train_loader(case: Case, rows: Rows) -> Any:
    if case.loader == "stateful":
        return StatefulDataLoader(rows, batch_size=BATCH, shuffle=True)
    return DataLoader(rows, batch_size=BATCH, shuffle=True, num_workers=2 if case.loader == "workers" else 0)


def run(
    case: Case,
    callback: OverlappedCheckpoint,
    *others: Callback,
    ckpt_path: str | None = None,
    seed: int = 3,
    on_batch: Callable[[Awkward, int], None] | None = None,
    catch: type[BaseException] | None = None,
    **options: Any,
) -> Outcome:
    """Seed, train, and tell how it ended. An exception of type ``catch`` is expected, and required."""
    L.seed_everything(seed, verbose=False)
    module, rows = Awkward(case), Rows(case.batches * BATCH)
    module.on_batch = on_batch
    trainer = make_trainer(case, callback, *others, **options)
    held_out = DataLoader(Rows(2 * BATCH), batch_size=BATCH)
    raised: BaseException | None = None
    try:
        trainer.fit(module, train_loader(case, rows), held_out, ckpt_path=ckpt_path)
    except BaseException as error:
        if catch is None or not isinstance(error, catch):
            raise
        raised = error
    assert (raised is None) == (catch is None)
    return Outcome(module=module, trainer=trainer, callback=callback, seen=rows.seen, state=final(module, trainer))


def final(module: L.LightningModule, trainer: L.Trainer) -> dict[str, Any]:
    """What must be equal for two runs to have been the same."""
    return {
        "rng": rng_state(),
        "state_dict": dict(module.state_dict()),
        "optimizers": [optimizer.state_dict() for optimizer in trainer.optimizers],
        "schedulers": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
        "precision": trainer.precision_plugin.state_dict(),
        "metrics": dict(trainer.callback_metrics),
        "step": trainer.global_step,
        "epoch": trainer.current_epoch,
    }


def saved(folder: Path) -> dict[int, str]:
    """Path of the checkpoint of every step, in order."""
    result = scan(str(folder))
    assert not result.problems
    return {entry.manifest.step: entry.path for entry in reversed(result.entries)}


def content(path: str) -> dict[str, Any]:
    """A checkpoint's state but for what names its own folder (the callbacks' paths)."""
    state = load_state(path)
    callbacks = state.pop("callbacks")
    state["others"] = {key: value for key, value in callbacks.items() if not key.startswith("OverlappedCheckpoint")}
    return state


def delivered(path: str, case: Case) -> int:
    """Batches that were trained when the checkpoint was made."""
    loop = load_state(path)["loops"]["fit_loop"]
    return int(loop["epoch_loop.batch_progress"]["total"]["completed"])


def strict_warnings() -> None:
    """Replay must not be given up quietly: the engine says so in a warning."""
    warnings.filterwarnings("error", message=".*(copied directly|checkpointed by copying|differs|failed|passed over).*")


SIGNALLED = Case(options={"foreach": False}, scheduler="epoch")
"""The case of the runs in processes of their own."""


def run_to_the_end(folder: str, report: str, kill: str = "") -> None:
    """What a process of its own runs: resume from the newest checkpoint, train, leave the final state behind.

    With ``kill``, SIGTERM comes in the middle of the update of that step, once.
    """
    torch.set_num_threads(1)
    case = SIGNALLED
    callback = saver(Path(folder), every_n_train_steps=case.every)
    signaller = SignalInUpdate(int(kill)) if kill else None
    others = [] if signaller is None else [signaller]
    outcome = run(case, callback, *others, ckpt_path="last" if saved(Path(folder)) else None)
    torch.save({"state": outcome.state, "ids": outcome.ids}, report)


class SignalInUpdate(Callback):
    """Sends this process SIGTERM when the first parameter group is updated and the second is not."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.sent = False

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        import signal

        optimizer: Any = trainer.optimizers[0]
        last, real = optimizer.param_groups[-1], optimizer._init_group

        def init_group(group: dict[str, Any], *rest: Any) -> Any:
            # On the instance alone, so that its class, and with it replay, stays what it was.
            if group is last and trainer.global_step + 1 == self.step and not self.sent:
                self.sent = True
                os.kill(os.getpid(), signal.SIGTERM)
            return real(group, *rest)

        optimizer._init_group = init_group
