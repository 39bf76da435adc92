"""Kill a training run in the middle of a checkpoint, resume it, and compare it with one that was never interrupted.

    make demo

Three trainings of `lightning_gpt.py`, each in a process of its own: one that runs through, one that gets SIGKILL while
a window is open, and one that resumes it with the same command. Every checkpoint that the first and the last wrote is
then compared bit by bit. The exit status is 0 only if nothing differs.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bitwise import Comparison, compare_checkpoints
from rich.console import Console
from rich.table import Table

from ckpt_engine.restore.catalog import scan

HERE = Path(__file__).resolve().parent
RUNS = HERE.parent / "demo-runs"
STEPS, EVERY, WINDOW = 40, 10, 4
KILL_TARGET = 30
PATIENCE_S = 900.0
OPTIONS = {"max-steps": STEPS, "every": EVERY, "window": WINDOW, "batch-size": 4}

console = Console(highlight=False)
Lines = list[dict[str, Any]]


class DemoError(RuntimeError):
    """The demo could not be carried out; says why."""


@dataclass(kw_only=True, eq=False, slots=True)
class Run:
    """One training process and the files it leaves.

    Args:
        folder: Directory of the run. A second run in the same directory resumes the first.
        status: Exit status of the process; negative for a signal.
        steps: Lines of the witness that this process wrote.
        saves: Records of the engine that this process wrote.
        seconds: How long it ran.
    """

    folder: Path
    status: int
    steps: Lines
    saves: Lines
    seconds: float

    @property
    def started_at(self) -> int:
        """Step that training started from; more than 0 after a resume."""
        return int(next(line["step"] for line in self.steps if line["event"] == "start"))

    @property
    def reached(self) -> int:
        """Step whose backward pass ran last."""
        return max((int(line["step"]) for line in self.steps), default=0)

    @property
    def memory(self) -> dict[str, int]:
        """Counters of the engine at the end; empty for a killed process."""
        return next((dict(line["memory"]) for line in self.steps if line["event"] == "end"), {})


def read_lines(path: Path) -> Lines:
    """Whole lines of a JSON-lines file; a last one without its line end is still being written."""
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8")
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def command(folder: Path) -> list[str]:
    """The command line of a training process."""
    options = [part for name, value in OPTIONS.items() for part in (f"--{name}", str(value))]
    return [sys.executable, str(HERE / "witness.py"), str(folder / "steps.jsonl"), "--dir", str(folder), *options]


def run(folder: Path, *, kill_when: Callable[[Lines], bool] | None = None) -> Run:
    """Train in ``folder``; with ``kill_when``, send SIGKILL as soon as it holds for the lines written so far.

    Raises:
        DemoError: The process failed, took too long, or ended before it could be killed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    steps, saves, log = folder / "steps.jsonl", folder / "saves.jsonl", folder / "output.log"
    before = len(read_lines(steps)), len(read_lines(saves))
    start = time.monotonic()
    with log.open("ab") as output:
        process = subprocess.Popen(command(folder), stdout=output, stderr=subprocess.STDOUT, env=environment())
        try:
            watch(process, lambda: read_lines(steps)[before[0] :], kill_when)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    expected = 0 if kill_when is None else -signal.SIGKILL
    if process.returncode != expected:
        raise DemoError(f"The training in {folder} ended with status {process.returncode}:\n{tail(log)}")
    return Run(
        folder=folder,
        status=process.returncode,
        steps=read_lines(steps)[before[0] :],
        saves=read_lines(saves)[before[1] :],
        seconds=time.monotonic() - start,
    )


def watch(
    process: subprocess.Popen[bytes], lines: Callable[[], Lines], kill_when: Callable[[Lines], bool] | None
) -> None:
    """Wait for the process to end, or kill it when its time has come."""
    deadline = time.monotonic() + PATIENCE_S
    while process.poll() is None:
        if time.monotonic() > deadline:
            raise DemoError(f"A training took more than {PATIENCE_S:.0f} s: run the demo on a quieter machine.")
        if kill_when is not None and kill_when(lines()):
            process.kill()
            process.wait()
            return
        time.sleep(0.005 if kill_when is not None else 0.1)


def environment() -> dict[str, str]:
    """The same number of threads for every process: sums of floats depend on it."""
    threads = str(min(4, os.cpu_count() or 1))
    return os.environ | {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}


def in_the_window(lines: Lines) -> bool:
    """Whether the window for the fatal step is open and part of it is on the host."""
    last = lines[-1] if lines else {}
    window = last.get("window") or {}
    return window.get("target") == KILL_TARGET and int(last["step"]) >= KILL_TARGET - WINDOW + 3


def tail(log: Path, lines: int = 15) -> str:
    """The end of a log."""
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])


def checkpoints(folder: Path) -> dict[int, str]:
    """Path of every complete checkpoint of a run, by step."""
    return {entry.manifest.step: entry.path for entry in reversed(scan(str(folder / "checkpoints")).entries)}


def compare_runs(left: Path, right: Path) -> dict[int, Comparison]:
    """Compare the checkpoints of two runs, step by step.

    Raises:
        DemoError: They did not write checkpoints of the same steps.
    """
    ours, theirs = checkpoints(left), checkpoints(right)
    if ours.keys() != theirs.keys() or STEPS not in ours:
        raise DemoError(f"Checkpoints of steps {sorted(ours)} against {sorted(theirs)}: they should be the same steps.")
    return {step: compare_checkpoints(ours[step], theirs[step]) for step in sorted(ours)}


def table(runs: Sequence[tuple[str, Run]]) -> Table:
    """What each training did."""
    view = Table(title="byte-level GPT, AdamW, Lightning", title_justify="left")
    view.add_column("")
    for name, _ in runs:
        view.add_column(name, justify="right")
    rows: dict[str, Callable[[Run], str]] = {
        "steps": lambda r: f"{r.started_at + 1}-{r.reached}",
        "ended by": lambda r: "SIGKILL" if r.status < 0 else "itself",
        "saves": lambda r: str(sum(save["ok"] for save in r.saves)),
        "window lengths, steps": lambda r: " ".join(str(save["window_steps"]) for save in r.saves),
        "image, MiB": lambda r: mib(max(save["image_bytes"] for save in r.saves)),
        "gradients per save, MiB": lambda r: mib(statistics.median(save["gradient_bytes"] for save in r.saves)),
        "stall per save, median ms": lambda r: f"{1e3 * statistics.median(save['stall_s'] for save in r.saves):.1f}",
        "until durable, median ms": lambda r: f"{1e3 * statistics.median(save['persist_s'] for save in r.saves):.0f}",
        "host memory, images + owed, MiB": lambda r: memory(r),
        "seconds": lambda r: f"{r.seconds:.0f}",
    }
    for label, cell in rows.items():
        view.add_row(label, *(cell(run) for _, run in runs))
    return view


def mib(nbytes: float) -> str:
    return f"{nbytes / 2**20:.1f}"


def memory(run: Run) -> str:
    return f"{mib(run.memory['images_peak'])} + {mib(run.memory['gradients_peak'])}" if run.memory else "-"


def check(killed: Run, resumed: Run) -> None:
    """The story must be the one that the demo tells.

    Raises:
        DemoError: It is not.
    """
    if (killed.steps[-1].get("window") or {}).get("target") != KILL_TARGET:
        raise DemoError(f"The process was not killed in the window for step {KILL_TARGET}: run the demo again.")
    if resumed.started_at != KILL_TARGET - EVERY:
        raise DemoError(f"The run resumed from step {resumed.started_at}, not from {KILL_TARGET - EVERY}.")


def main() -> int:
    """Run the demo; the exit status."""
    shutil.rmtree(RUNS, ignore_errors=True)
    console.print(f"1. {STEPS} steps without interruption, a checkpoint every {EVERY}, spread over {WINDOW} steps")
    whole = run(RUNS / "whole")
    console.print(f"2. The same again, and SIGKILL while the window for step {KILL_TARGET} is open")
    killed = run(RUNS / "killed", kill_when=in_the_window)
    console.print(f"   killed in step {killed.reached}; complete on disk: steps {sorted(checkpoints(killed.folder))}")
    console.print("3. The same command once more")
    resumed = run(RUNS / "killed")
    console.print(f"   resumed from step {resumed.started_at}, ran to step {resumed.reached}\n")
    check(killed, resumed)
    outcomes = compare_runs(whole.folder, resumed.folder)
    console.print(table([("uninterrupted", whole), ("killed", killed), ("resumed", resumed)]))
    return report(outcomes)


def report(outcomes: dict[int, Comparison]) -> int:
    """Say whether the runs are identical; the exit status."""
    total = Comparison()
    for step, outcome in outcomes.items():
        total.tensors += outcome.tensors
        total.bits += outcome.bits
        total.leaves += outcome.leaves
        total.differences += [f"step {step}: {difference}" for difference in outcome.differences]
    steps = ", ".join(str(step) for step in outcomes)
    console.print(f"compared: checkpoints of steps {steps} and {total.leaves} other values")
    console.print(f"identical: {total}")
    for difference in total.differences[:20]:
        console.print(f"  {difference}", markup=False, soft_wrap=True)
    return 0 if total.identical else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except DemoError as error:
        console.print(f"[bold]The demo failed.[/bold] {error}")
        sys.exit(1)
