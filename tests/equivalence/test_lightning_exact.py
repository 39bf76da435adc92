"""Under a real Trainer: a checkpoint captured over several steps equals one taken at once, and a run resumed from it
ends in the same bits as the run that nobody stopped, wherever in an epoch it was made."""

from __future__ import annotations

import multiprocessing
import signal
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback, EMAWeightAveraging, WeightAveraging
from torch.utils.data import DataLoader

from ckpt_engine.restore.catalog import scan
from tests.equivalence import lightning_runs
from tests.equivalence.harness import differences
from tests.equivalence.lightning_runs import (
    BATCH,
    CARRIED,
    Awkward,
    Case,
    Outcome,
    Rows,
    content,
    delivered,
    final,
    make_trainer,
    run,
    saved,
    saver,
    train_loader,
)

SGD = {"momentum": 0.9, "nesterov": True, "weight_decay": 1e-3}
RMS = {"centered": True, "momentum": 0.9}
DECAY = {"weight_decay": 0.1}
FUSED = DECAY | {"fused": True}

# Every optimizer with several precisions; clipping, accumulation, style, scheduler and loader in turn. Left out is
# what Lightning or torch refuses: a fused optimizer with clipping under mixed precision, LBFGS with a scaler.
COVERING = [
    Case(optimizer="SGD", options=SGD, clip="norm", accumulate=3, loader="workers"),
    Case(optimizer="SGD", options=SGD, precision="bf16-mixed", style="two", loader="stateful"),
    Case(optimizer="SGD", options=SGD, precision="16-mixed", clip="value", scheduler="epoch", estimate=True),
    Case(optimizer="SGD", options=SGD, precision="bf16-true", accumulate=3, style="manual", scheduler="none"),
    Case(options=DECAY, accumulate=3, clip="value", scheduler="plateau-train"),
    Case(options=DECAY, precision="bf16-mixed", clip="norm", scheduler="plateau-val", loader="workers"),
    Case(options=DECAY, precision="16-mixed", clip="norm", accumulate=3, loader="stateful", estimate=True),
    Case(options=DECAY, precision="16-mixed", style="two", accumulate=3, loader="workers"),
    Case(options=DECAY, precision="bf16-true", clip="norm", style="manual", loader="stateful"),
    Case(options=FUSED, clip="norm", scheduler="epoch", loader="stateful"),
    Case(options=FUSED, precision="bf16-mixed", accumulate=3, estimate=True),
    Case(options=FUSED, precision="16-mixed", accumulate=3, scheduler="plateau-train", loader="workers"),
    Case(options=FUSED, precision="16-mixed", style="manual", scheduler="none"),
    Case(options=FUSED, precision="bf16-true", clip="value", style="two"),
    Case(optimizer="NAdam", clip="value", style="manual", accumulate=3),
    Case(optimizer="NAdam", precision="bf16-true", scheduler="plateau-train", loader="stateful", estimate=True),
    Case(optimizer="NAdam", precision="16-mixed", clip="norm", scheduler="plateau-val"),
    Case(optimizer="RAdam", precision="bf16-mixed", clip="value", accumulate=3, scheduler="epoch", loader="workers"),
    Case(optimizer="RAdam", precision="16-mixed", style="manual", clip="none"),
    Case(optimizer="Adagrad", options={"lr_decay": 0.01}, clip="norm", style="two", accumulate=3),
    Case(optimizer="Adagrad", precision="16-mixed", scheduler="plateau-val", loader="stateful"),
    Case(optimizer="RMSprop", options=RMS, precision="bf16-true", clip="norm", accumulate=3, scheduler="plateau-val"),
    Case(optimizer="RMSprop", options=RMS, precision="16-mixed", scheduler="none", loader="workers", estimate=True),
    Case(optimizer="Adafactor", clip="norm", scheduler="plateau-train"),
    Case(optimizer="Adafactor", precision="16-mixed", accumulate=3, clip="value", scheduler="epoch"),
    Case(optimizer="Adafactor", precision="bf16-mixed", style="two", loader="stateful", scheduler="none"),
]
LBFGS = [
    Case(optimizer="LBFGS", options={"lr": 0.1, "max_iter": 3}, scheduler="epoch", loader="workers"),
    Case(optimizer="LBFGS", options={"lr": 0.1, "max_iter": 3}, precision="bf16-mixed", accumulate=3),
]


@pytest.fixture(autouse=True)
def _one_thread_and_no_quiet_fallback() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        lightning_runs.strict_warnings()
        yield
    torch.set_num_threads(threads)


def same_checkpoints(folder: Path, reference: Path) -> dict[int, str]:
    """Assert that two folders hold the same steps with the same bits; return the paths in the first."""
    ours, theirs = saved(folder), saved(reference)
    assert list(ours) == list(theirs)
    for step, path in ours.items():
        assert differences(content(path), content(theirs[step]), f"step {step}") == []
    return ours


def resumes_exactly(case: Case, path: str, full: Outcome, folder: Path, *others: Any, **options: Any) -> Outcome:
    """Assert that the run resumed from ``path`` sees what was left of ``full`` and ends like it."""
    done = delivered(path, case)
    # Another seed: whatever is not restored would differ.
    again = run(case, saver(folder, "sync", every_n_train_steps=10**6), *others, ckpt_path=path, seed=99, **options)
    assert differences(again.state, full.state, path) == []
    if case.optimizer != "LBFGS":
        assert again.ids == full.ids[done:]
    if case.loader == "plain" and full.seen:
        assert again.seen == full.seen[done * BATCH :]
    return again


def check(case: Case, folder: Path) -> Outcome:
    every = {"every_n_train_steps": case.every}
    full = run(case, saver(folder / "ours", **every))
    reference = run(case, saver(folder / "sync", "sync", **every))
    assert differences(full.state, reference.state) == []
    paths = same_checkpoints(folder / "ours", folder / "sync")
    # In the middle and at the end of epoch 0, and of a later one.
    assert list(paths) == [k * case.every for k in range(1, 7)]
    for entry in scan(str(folder / "ours")).entries:
        window = entry.manifest.window
        assert entry.manifest.audit["result"] == "bit-exact"
        # Replay is rehearsed in the second update: before it nothing is known of the optimizer's state.
        steps = min(3, case.rounds // 2)
        assert window["steps"] == steps or (window["steps"] == 1 and entry.manifest.step == 2 * case.stride)
        assert (int(window["replayed_updates"]) > 0) == (window["steps"] > 1)
    for step in list(paths)[:4]:
        resumes_exactly(case, paths[step], full, folder / "resumed")
    return full


@pytest.mark.parametrize("case", COVERING, ids=lambda case: case.title)
def test_windows_equal_snapshots_and_resumed_runs_the_uninterrupted_one(case: Case, tmp_path: Path) -> None:
    full = check(case, tmp_path)
    if case.precision == "16-mixed":
        assert float(full.state["precision"]["scale"]) < 1024.0
    if case.scheduler.startswith("plateau"):
        assert full.state["schedulers"][0]["_last_lr"][0] < 1e-2


@pytest.mark.parametrize("case", LBFGS, ids=lambda case: case.title)
def test_an_optimizer_without_replay_is_copied_and_resumed_exactly(case: Case, tmp_path: Path) -> None:
    warnings.filterwarnings("ignore", message=".*checkpointed by copying.*")
    every = {"every_n_train_steps": case.every}
    full = run(case, saver(tmp_path / "ours", **every))
    run(case, saver(tmp_path / "sync", "sync", **every))
    paths = same_checkpoints(tmp_path / "ours", tmp_path / "sync")
    for step in list(paths)[:4]:
        resumes_exactly(case, paths[step], full, tmp_path / "resumed")


# -- validation ------------------------------------------------------------------------------------------------------

AT_VALIDATION = {"every_n_epochs": 1, "save_on_train_epoch_end": False, "filename": "{epoch}-{step}-{val_loss:.3f}"}


@pytest.mark.parametrize("scheduler", ["cosine", "plateau-val"])
def test_a_save_at_the_end_of_validation_in_mid_epoch(scheduler: str, tmp_path: Path) -> None:
    case, options = Case(options=DECAY, scheduler=scheduler), {"val_check_interval": 0.5}
    full = run(case, saver(tmp_path / "ours", **AT_VALIDATION), **options)
    run(case, saver(tmp_path / "sync", "sync", **AT_VALIDATION), **options)
    paths = same_checkpoints(tmp_path / "ours", tmp_path / "sync")
    assert list(paths) == [4, 8, 12, 16, 20, 24]
    windows = [entry.manifest.window["steps"] for entry in scan(str(tmp_path / "ours")).entries]
    assert windows == [3] * 6
    for step in (4, 8, 12, 16):
        resumes_exactly(case, paths[step], full, tmp_path / "resumed", **options)


@pytest.mark.parametrize("averaging", [WeightAveraging, EMAWeightAveraging])
def test_validation_swaps_weights_while_a_window_is_open(averaging: type[Any], tmp_path: Path) -> None:
    case, options = Case(options=DECAY), {"val_check_interval": 0.25}

    def average() -> Any:
        return averaging() if averaging is WeightAveraging else averaging(decay=0.9)

    every = {"every_n_train_steps": 6}
    full = run(case, saver(tmp_path / "ours", **every), average(), **options)
    run(case, saver(tmp_path / "sync", "sync", **every), average(), **options)
    paths = same_checkpoints(tmp_path / "ours", tmp_path / "sync")
    # After the last one the callback puts the average into the model: the window must not see that.
    assert list(paths) == [6, 12, 18, 24]
    assert {entry.manifest.window["steps"] for entry in scan(str(tmp_path / "ours")).entries} == {3}
    last = content(paths[24])
    assert differences(last["state_dict"], last["current_model_state"]) != []
    for step in (6, 18):
        resumes_exactly(case, paths[step], full, tmp_path / "resumed", average(), **options)


class Busy(Callback):
    """Draws random numbers and counts in the hooks of an epoch; part of the checkpoint."""

    def __init__(self) -> None:
        self.drawn: list[float] = []

    def on_train_epoch_start(self, *_: Any) -> None:
        self.drawn.append(float(torch.rand(())))

    def on_train_epoch_end(self, *_: Any) -> None:
        self.drawn.append(-float(torch.rand(())))

    def state_dict(self) -> dict[str, Any]:
        return {"drawn": list(self.drawn)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.drawn = list(state_dict["drawn"])


@pytest.mark.parametrize("options", [{}, {"reload_dataloaders_every_n_epochs": 1}], ids=["", "reload"])
@pytest.mark.parametrize("loader", ["plain", "workers"])
def test_hooks_of_an_epoch_run_once(loader: str, options: dict[str, Any], tmp_path: Path) -> None:
    """A checkpoint at the end of an epoch lies before the first hook of the next one."""
    case, every = Case(options=DECAY, loader=loader), {"every_n_train_steps": 4}
    hooks = Busy()
    full = run(case, saver(tmp_path / "ours", **every), hooks, **options)
    run(case, saver(tmp_path / "sync", "sync", **every), Busy(), **options)
    paths = same_checkpoints(tmp_path / "ours", tmp_path / "sync")
    for step in (4, 8, 12, 16):
        again = Busy()
        resumes_exactly(case, paths[step], full, tmp_path / "resumed", again, **options)
        assert again.drawn == hooks.drawn


def test_a_save_after_validation_in_the_middle_of_an_accumulation(tmp_path: Path) -> None:
    case, options = Case(options=DECAY, accumulate=3, clip="norm"), {"val_check_interval": 4}
    full = run(case, saver(tmp_path / "ours", **AT_VALIDATION), **options)
    run(case, saver(tmp_path / "sync", "sync", **AT_VALIDATION), **options)
    ours, theirs = ({p.name: str(p) for p in (tmp_path / name).iterdir()} for name in ("ours", "sync"))
    assert ours.keys() == theirs.keys()
    partial = 0
    for name, path in ours.items():
        state = content(path)
        assert differences(state, content(theirs[name]), name) == []
        partial += bool(state[CARRIED]["gradients"])
        resumes_exactly(case, path, full, tmp_path / "resumed", **options)
    assert partial >= 3


# -- several fits, and runs cut short --------------------------------------------------------------------------------


def _twice(case: Case, folder: Path, capture: str) -> Outcome:
    torch.manual_seed(3)
    module, rows = Awkward(case), Rows(case.batches * BATCH)
    callback = saver(folder, capture, every_n_train_steps=case.every)
    trainer = make_trainer(case, callback, max_epochs=1)
    held_out = DataLoader(Rows(2 * BATCH), batch_size=BATCH)
    trainer.fit(module, train_loader(case, rows), held_out)
    trainer.fit_loop.max_epochs = 3
    trainer.fit(module, train_loader(case, rows), held_out)
    return Outcome(module=module, trainer=trainer, callback=callback, seen=rows.seen, state=final(module, trainer))


def test_fit_called_twice(tmp_path: Path) -> None:
    case = Case(options=DECAY)
    full, reference = (_twice(case, tmp_path / capture, capture) for capture in ("multi_step", "sync"))
    assert differences(full.state, reference.state) == []
    paths = same_checkpoints(tmp_path / "multi_step", tmp_path / "sync")
    assert list(paths) == [4, 8, 12, 16, 20, 24]
    for step in (12, 16):
        resumes_exactly(case, paths[step], full, tmp_path / "resumed")


@pytest.mark.parametrize("accumulate", [1, 3])
def test_max_steps_in_mid_epoch_and_a_larger_one_afterwards(accumulate: int, tmp_path: Path) -> None:
    case = Case(options=DECAY, accumulate=accumulate)
    full = run(case, saver(tmp_path / "full", every_n_train_steps=3))
    run(case, saver(tmp_path / "short", every_n_train_steps=3), max_steps=3)
    path = saved(tmp_path / "short")[3]
    assert differences(content(path)["state_dict"], content(saved(tmp_path / "full")[3])["state_dict"]) == []
    resumes_exactly(case, path, full, tmp_path / "resumed")


@pytest.mark.parametrize("scheduler", ["cosine", "epoch", "plateau-train"])
@pytest.mark.parametrize(("error", "step"), [(ValueError, 6), (ValueError, 8), (KeyboardInterrupt, 13)])
def test_an_exception_in_training_step(error: type[BaseException], step: int, scheduler: str, tmp_path: Path) -> None:
    """Raised at the step's start: the batch was fetched, nothing of it was done."""
    case = Case(options=DECAY, scheduler=scheduler)
    full = run(case, saver(tmp_path / "full", every_n_train_steps=5))

    def stop(module: Awkward, batch_idx: int) -> None:
        if module.global_step == step:
            raise error("stopped by the test")

    callback = saver(tmp_path / "ours", every_n_train_steps=5, save_on_exception=True)
    before = signal.getsignal(signal.SIGINT)
    # Lightning turns KeyboardInterrupt into an exit.
    run(case, callback, on_batch=stop, catch=SystemExit if error is KeyboardInterrupt else error)
    signal.signal(signal.SIGINT, before)
    paths = saved(tmp_path / "ours")
    assert max(paths) == step
    for path in paths.values():
        resumes_exactly(case, path, full, tmp_path / "resumed")


@pytest.mark.parametrize("step", [6, 8])
def test_sigterm_in_the_middle_of_an_update(step: int, tmp_path: Path) -> None:
    """A real signal, when the first parameter group is updated and the second is not."""
    case = lightning_runs.SIGNALLED
    full = run(case, saver(tmp_path / "full", "sync", every_n_train_steps=1))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.crash.warm"])
    report = tmp_path / "report"
    for kill in (str(step), ""):
        process = context.Process(
            target=lightning_runs.run_to_the_end, args=(str(tmp_path / "ours"), str(report), kill)
        )
        process.start()
        process.join(120)
        assert report.exists() == (kill == "")
        if kill:
            paths = saved(tmp_path / "ours")
            assert max(paths) == step
            ours, theirs = content(paths[step]), content(saved(tmp_path / "full")[step])
            for part in ("state_dict", "optimizer_states", "lr_schedulers"):
                assert differences(ours[part], theirs[part], part) == []
    ended = torch.load(report, weights_only=False)
    assert differences(ended["state"], full.state) == []
    assert ended["ids"] == full.ids[step:]


def test_a_wrong_resume_is_noticed(tmp_path: Path) -> None:
    """The comparison above is able to fail: another seed without a checkpoint ends elsewhere."""
    case = Case(options=DECAY)
    full = run(case, saver(tmp_path, "sync", every_n_train_steps=10**6))
    other = run(replace(case), saver(tmp_path, "sync", every_n_train_steps=10**6), seed=99)
    assert differences(other.state["state_dict"], full.state["state_dict"]) != []
    assert other.ids != full.ids
