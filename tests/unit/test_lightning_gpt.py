"""The example that users copy: its data is deterministic, its model is causal, and it resumes where it stopped."""

from __future__ import annotations

import argparse
from pathlib import Path

import lightning_gpt
import pytest
import torch
from bitwise import compare_checkpoints

from ckpt_engine.restore.catalog import newest


def options(folder: Path, *, max_steps: int) -> argparse.Namespace:
    sizes = ["--batch-size", "2", "--context", "16", "--width", "20", "--layers", "1", "--text-bytes", "2000"]
    return lightning_gpt.parse(["--dir", str(folder), "--max-steps", str(max_steps), "--every", "4", *sizes])


def test_the_text_is_the_same_each_time_and_of_the_size_asked_for() -> None:
    text = lightning_gpt.standard_library(50_000)
    assert len(text) == 50_000
    assert lightning_gpt.standard_library(1_000) == text[:1_000]


def test_a_text_larger_than_the_library_is_refused_with_a_sentence() -> None:
    with pytest.raises(SystemExit, match="ask for fewer with --text-bytes"):
        lightning_gpt.standard_library(1 << 40)


def test_chunks_follow_each_other_and_overlap_by_the_byte_to_predict() -> None:
    chunks = lightning_gpt.Chunks(bytes(range(25)), 8)
    assert len(chunks) == 3
    assert chunks[0].tolist() == list(range(9))
    assert chunks[2].tolist() == list(range(16, 25))


def test_the_model_never_looks_ahead() -> None:
    model = lightning_gpt.ByteGPT(context=16, width=20, layers=2).eval()
    tokens = torch.randint(256, (1, 16))
    changed = tokens.clone()
    changed[0, 9:] = (changed[0, 9:] + 1) % 256
    before, after = model(tokens), model(changed)
    assert torch.equal(before[0, :9], after[0, :9])
    assert not torch.equal(before[0, 9:], after[0, 9:])


def test_the_learning_rate_warms_up_and_falls_to_a_tenth() -> None:
    model = lightning_gpt.ByteGPT(context=16, width=20, layers=1, warmup_steps=10, max_steps=110)
    factors = [model.learning_rate_factor(step) for step in (0, 9, 10, 60, 110)]
    assert factors == pytest.approx([0.1, 1.0, 1.0, 0.55, 0.1])


def test_decay_is_for_matrices_and_every_parameter_is_in_one_group() -> None:
    model = lightning_gpt.ByteGPT(context=16, width=20, layers=1)
    decayed, plain = model.configure_optimizers()["optimizer"].param_groups
    assert {p.dim() for p in decayed["params"]} == {2}
    assert {p.dim() for p in plain["params"]} == {1}
    assert len(decayed["params"]) + len(plain["params"]) == len(list(model.parameters()))


def test_a_run_in_two_pieces_ends_with_the_bits_of_one_in_one_piece(tmp_path: Path) -> None:
    lightning_gpt.train(options(tmp_path / "whole", max_steps=12))
    pieces = options(tmp_path / "pieces", max_steps=12)
    lightning_gpt.train(argparse.Namespace(**vars(pieces)), [StopAfter(8)])
    lightning_gpt.train(pieces)
    ends = [newest(str(tmp_path / name / "checkpoints")) for name in ("whole", "pieces")]
    assert [end.manifest.step for end in ends] == [12, 12]
    outcome = compare_checkpoints(ends[0].path, ends[1].path)
    assert outcome.identical, outcome.differences


class StopAfter(lightning_gpt.Callback):
    """Ends training gracefully after some steps, as a time limit does."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def on_train_batch_end(self, trainer: lightning_gpt.Trainer, *arguments: object) -> None:
        trainer.should_stop = trainer.global_step >= self.steps
