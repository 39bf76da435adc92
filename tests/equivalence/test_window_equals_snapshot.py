"""A checkpoint captured over several steps equals a copy taken at once; a run resumed from it, the whole run."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

from ckpt_engine.config import CheckpointConfig
from ckpt_engine.engine import Engine
from ckpt_engine.restore.reader import load
from tests.equivalence.harness import Recipe, Run, differences, load_state, run_and_save
from tests.equivalence.recipes import full, pairs

SAVES = (9, 14)
STEPS = 18


def _config(**options: object) -> CheckpointConfig:
    # Tiny blocks, so that every tensor of the toy model is cut; a full audit, so that nothing hides.
    settings = {"mode": "multi_step", "window_steps": 4, "block_bytes": 4096, "audit": "full", **options}
    return CheckpointConfig(**settings)  # type: ignore[arg-type]


def check(recipe: Recipe, folder: Path, *, expect_replay: bool = True, **options: object) -> Engine:
    """Save twice in windows, compare with copies taken at once, resume from the first and compare the ends."""
    run, truth, engine = run_and_save(recipe, str(folder), config=_config(**options), steps=STEPS, saves=SAVES)
    for step in SAVES:
        assert differences(load_state(f"{folder}/step-{step}"), truth[step]) == []
    for record in engine.records:
        assert record.ok
        assert record.window_steps == 4
        assert record.audit["result"] == "bit-exact"
    # With a scaler, every update of one window may be skipped, and then there is nothing to replay in it.
    assert any(record.gradient_bytes > 0 for record in engine.records) == expect_replay
    resumed = Run(recipe)
    resumed.restore(load_state(f"{folder}/step-{SAVES[0]}"))
    while resumed.step < STEPS:
        resumed.one_round(None)
    assert differences(resumed.state(), run.state()) == []
    return engine


@pytest.mark.parametrize("recipe", pairs(), ids=lambda recipe: recipe.title)
def test_window_equals_snapshot_and_resume_equals_uninterrupted(recipe: Recipe, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        warnings.filterwarnings("ignore", message=".*lr_scheduler.step.*")
        check(recipe, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("recipe", full(), ids=lambda recipe: recipe.title)
def test_full_product(recipe: Recipe, tmp_path: Path) -> None:
    check(recipe, tmp_path)


@pytest.mark.parametrize("steps", [1, 2, 3, 5, 8])
def test_any_number_of_steps_gives_the_same_checkpoint(steps: int, tmp_path: Path) -> None:
    recipe = Recipe(options={"weight_decay": 0.1}, clip="norm")
    mode = "one_step" if steps == 1 else "multi_step"
    config = _config(mode=mode, window_steps=steps)
    _, truth, engine = run_and_save(recipe, str(tmp_path), config=config, steps=STEPS, saves=SAVES)
    for step in SAVES:
        assert differences(load_state(f"{tmp_path}/step-{step}"), truth[step]) == []
    # The second window can open once round 10 has completed the first.
    assert [record.window_steps for record in engine.records] == [steps, min(steps, 5)]


@pytest.mark.parametrize("mode", ["auto", "multi_step", "one_step", "async", "sync"])
def test_all_modes_write_the_same_state(mode: str, tmp_path: Path) -> None:
    recipe = Recipe(options={"weight_decay": 0.1}, precision="16-mixed", clip="norm", accumulate=3)
    config = CheckpointConfig(mode=mode)  # type: ignore[arg-type]
    _, truth, _ = run_and_save(recipe, str(tmp_path), config=config, steps=STEPS, saves=SAVES)
    for step in SAVES:
        assert differences(load_state(f"{tmp_path}/step-{step}"), truth[step]) == []


def test_unfenced_loops_copy_gradients_before_the_update(tmp_path: Path) -> None:
    recipe = Recipe(options={"weight_decay": 0.1}, zero_in_place=True)
    _, truth, _ = run_and_save(recipe, str(tmp_path), config=_config(), steps=STEPS, saves=SAVES, fenced=False)
    for step in SAVES:
        assert differences(load_state(f"{tmp_path}/step-{step}"), truth[step]) == []


def test_closures_are_followed(tmp_path: Path) -> None:
    recipe = Recipe(options={"weight_decay": 0.1}, clip="norm", accumulate=3)
    _, truth, engine = run_and_save(
        recipe, str(tmp_path), config=_config(), steps=STEPS, saves=SAVES, closure=True
    )
    for step in SAVES:
        assert differences(load_state(f"{tmp_path}/step-{step}"), truth[step]) == []
    assert all(record.gradient_bytes > 0 for record in engine.records)


@pytest.mark.parametrize("hook", ["clamp", "clamp-data"])
def test_writes_outside_the_optimizer_are_noticed_and_copied_again(hook: str, tmp_path: Path) -> None:
    recipe = Recipe(options={"weight_decay": 0.1}, hook=hook)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _, truth, _ = run_and_save(
            recipe, str(tmp_path), config=_config(audit="sample"), steps=STEPS, saves=SAVES
        )
    for step in SAVES:
        assert differences(load_state(f"{tmp_path}/step-{step}"), truth[step]) == []


def test_a_kernel_that_does_not_repeat_itself_is_found_and_copied_directly(tmp_path: Path) -> None:
    """Fused SGD with momentum in bfloat16 gives other bits on each call on CPU (torch 2.13)."""
    recipe = Recipe(optimizer="SGD", options={"momentum": 0.9, "fused": True}, precision="bf16-true")
    saves = (6, 9, 12, 15, 18, 21, 24)
    with pytest.warns(UserWarning, match="copied directly|copying its state|differs from the live state"):
        _, truth, engine = run_and_save(recipe, str(tmp_path), config=_config(), steps=26, saves=saves)
    for record in engine.records:
        if record.ok:
            assert differences(load_state(f"{tmp_path}/step-{record.step}"), truth[record.step]) == []
    # A failed audit turns replay off for good, so the last saves are whole again.
    assert [record.step for record in engine.records if record.ok][-2:] == [21, 24]


def test_lbfgs_falls_back_with_one_warning(tmp_path: Path) -> None:
    recipe = Recipe(optimizer="LBFGS", options={"lr": 0.1, "max_iter": 3})
    with pytest.warns(UserWarning, match="LBFGS is checkpointed by copying") as seen:
        _, truth, engine = run_and_save(
            recipe, str(tmp_path), config=_config(), steps=STEPS, saves=SAVES, closure=True
        )
    assert len([w for w in seen if "LBFGS is checkpointed" in str(w.message)]) == 1
    for step in SAVES:
        assert differences(load_state(f"{tmp_path}/step-{step}"), truth[step]) == []
    assert all(record.gradient_bytes == 0 for record in engine.records)


def test_the_image_holds_tied_weights_once(tmp_path: Path) -> None:
    run_and_save(Recipe(), str(tmp_path), config=_config(), steps=STEPS, saves=SAVES)
    loaded = load(f"{tmp_path}/step-9")
    names = [name for name in loaded.tensors if name.startswith("model.")]
    assert "model.emb.weight" in names
    assert "model.head.weight" not in names
    state = loaded.state
    assert isinstance(state, dict)
    tied = state["state_dict"]
    assert tied["emb.weight"].data_ptr() == tied["head.weight"].data_ptr()


def test_memory_is_two_images_and_the_gradients_owed(tmp_path: Path) -> None:
    recipe = Recipe(options={"weight_decay": 0.1})
    _, _, engine = run_and_save(
        recipe, str(tmp_path), config=_config(audit="sample"), steps=40, saves=(9, 14, 19, 24, 29, 34)
    )
    image = max(record.image_bytes for record in engine.records)
    gradients = sum(p.nbytes for p in Run(recipe).model.parameters())
    slack = 8 * 2**20
    assert engine.memory["images_peak"] <= 2 * image + slack
    assert engine.memory["gradients_peak"] <= 3 * gradients + slack
