"""The position in the data: consumed items are never fetched again, whatever loader delivers them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_ckpt import OverlappedCheckpoint
from lightning_ckpt.loader_position import SamplerProxy, is_stateful, position, proxy_of, resume, unwatch, watch
from tests.equivalence.harness import differences
from tests.lightning_runs import BATCHES, Rows, Tiny, final, fit, rows, trainer


class Stream(IterableDataset[torch.Tensor]):
    """Items in a fixed order, with no position of its own."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (Rows()[index] for index in range(4 * BATCHES))


class Augmented(Rows):
    """Rows with random noise, drawn where they are fetched."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return super().__getitem__(index) + torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0]) * torch.rand(1)


class OneRow(Tiny):
    """Trained on items that are not batched by the loader."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return super().training_step(torch.stack([batch, -batch]), batch_idx)


class Several(Tiny):
    """Trained on the batches of two loaders at once."""

    def training_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> torch.Tensor:
        parts = [part for part in (batch if isinstance(batch, list) else [batch]) if part is not None]
        return super().training_step(torch.cat(parts), batch_idx)


def both_runs(folder: Path, step: int, make: Any, module: type[Tiny] = Tiny, **options: Any) -> tuple[Any, Any, Any]:
    """The whole run and one resumed at ``step``; the resumed run's loader too."""
    options = {"max_epochs": 2, "validate": False} | options
    keep = OverlappedCheckpoint(dirpath=folder, every_n_train_steps=step, save_top_k=-1, filename="{step}")
    whole = fit(keep, module=module(), loader=make(), **options)
    loader = make()
    idle = OverlappedCheckpoint(dirpath=folder / "idle", every_n_train_steps=1000)
    resumed = fit(idle, module=module(), loader=loader, ckpt_path=str(folder / f"step={step}.ckpt"), seed=99, **options)
    return whole, resumed, loader


def assert_exact(whole: Any, resumed: Any) -> None:
    assert resumed[0].ids == whole[0].ids[-len(resumed[0].ids) :]
    assert differences(final(*resumed), final(*whole)) == []


@pytest.mark.parametrize("step", [1, BATCHES - 1, BATCHES, BATCHES + 2])
def test_a_shuffled_loader_goes_on_where_it_was_and_skipped_items_are_never_fetched(tmp_path: Path, step: int) -> None:
    whole, resumed, loader = both_runs(tmp_path, step, rows)
    assert_exact(whole, resumed)
    flat = [index for batch in whole[0].ids[step:] for index in batch]
    assert loader.dataset.seen == flat, "items of consumed batches were fetched, or others left out"


@pytest.mark.parametrize("options", [{}, {"persistent_workers": True}], ids=["fresh", "persistent"])
def test_workers_get_the_indices_and_seeds_that_they_would_have_had(tmp_path: Path, options: dict[str, Any]) -> None:
    whole, resumed, _ = both_runs(tmp_path, BATCHES + 2, lambda: rows(num_workers=2, **options), max_epochs=2)
    assert_exact(whole, resumed)


def own_generator() -> DataLoader[torch.Tensor]:
    return rows(generator=torch.Generator().manual_seed(5))


def sampler_with_generator() -> DataLoader[torch.Tensor]:
    sampler = RandomSampler(Rows(), generator=torch.Generator().manual_seed(6))
    return DataLoader(Rows(), batch_size=4, sampler=sampler)


def own_batch_sampler() -> DataLoader[torch.Tensor]:
    sampler = BatchSampler(RandomSampler(Rows(), replacement=True, num_samples=24), 4, drop_last=True)
    return DataLoader(Rows(), batch_sampler=sampler)


def in_order() -> DataLoader[torch.Tensor]:
    return DataLoader(Rows(), batch_size=4, sampler=SequentialSampler(Rows()))


@pytest.mark.parametrize("make", [own_generator, sampler_with_generator, own_batch_sampler, in_order])
def test_generators_and_samplers_given_by_the_user_are_followed(tmp_path: Path, make: Any) -> None:
    whole, resumed, loader = both_runs(tmp_path, 2, make)
    assert_exact(whole, resumed)
    assert loader.dataset.seen == [index for batch in whole[0].ids[2:] for index in batch]


def test_a_loader_that_does_not_batch_goes_on_where_it_was(tmp_path: Path) -> None:
    def make() -> DataLoader[torch.Tensor]:
        return DataLoader(Rows(BATCHES), batch_size=None, shuffle=True)

    whole, resumed, loader = both_runs(tmp_path, 2, make, OneRow)
    assert_exact(whole, resumed)
    assert loader.dataset.seen == [batch[0] for batch in whole[0].ids[2:]]


@pytest.mark.parametrize("mode", ["min_size", "max_size", "max_size_cycle"])
@pytest.mark.parametrize("step", [2, 5])
def test_several_loaders_go_on_each_where_it_was(tmp_path: Path, mode: str, step: int) -> None:
    def make() -> CombinedLoader:
        short = DataLoader(Rows(8), batch_size=4, shuffle=True)
        return CombinedLoader([rows(), short], mode)

    whole, resumed, _ = both_runs(tmp_path, step, make, Several, max_epochs=4)
    assert_exact(whole, resumed)


@pytest.mark.parametrize("step", [2, BATCHES + 3])
def test_an_iterable_without_a_position_is_advanced_by_fetching(tmp_path: Path, step: int) -> None:
    whole, resumed, _ = both_runs(tmp_path, step, lambda: DataLoader(Stream(), batch_size=4))
    assert_exact(whole, resumed)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_with_a_state_of_its_own_is_left_to_itself(tmp_path: Path, workers: int) -> None:
    def make() -> StatefulDataLoader[torch.Tensor]:
        return StatefulDataLoader(Rows(), batch_size=4, shuffle=True, num_workers=workers)

    whole, resumed, _ = both_runs(tmp_path, BATCHES + 3, make)
    assert_exact(whole, resumed)


@pytest.mark.parametrize("step", [2, BATCHES, BATCHES + 3])
def test_augmentation_in_this_process_draws_what_it_would_have_drawn(tmp_path: Path, step: int) -> None:
    whole, resumed, _ = both_runs(tmp_path, step, lambda: DataLoader(Augmented(), batch_size=4, shuffle=True))
    assert_exact(whole, resumed)


def test_augmentation_in_workers_is_exact_from_an_epoch_boundary(tmp_path: Path) -> None:
    def make() -> DataLoader[torch.Tensor]:
        return DataLoader(Augmented(), batch_size=4, shuffle=True, num_workers=2)

    whole, resumed, _ = both_runs(tmp_path, BATCHES, make, max_epochs=2)
    assert_exact(whole, resumed)


def test_workers_with_a_generator_of_the_users_go_on_into_the_next_epoch(tmp_path: Path) -> None:
    whole, resumed, _ = both_runs(
        tmp_path, 2, lambda: rows(num_workers=2, generator=torch.Generator().manual_seed(5)), max_epochs=2
    )
    assert_exact(whole, resumed)


def test_after_training_the_loader_is_as_the_user_made_it(tmp_path: Path) -> None:
    loader = rows()
    before = loader.batch_sampler
    fit(OverlappedCheckpoint(dirpath=tmp_path), loader=loader, max_steps=2)
    assert loader.batch_sampler is before


def test_watching_twice_wraps_once_and_unwatching_restores() -> None:
    loader = rows()
    before = loader.batch_sampler
    watch([loader])
    first = proxy_of(loader)
    watch([loader])
    assert isinstance(first, SamplerProxy)
    assert proxy_of(loader) is first
    unwatch([loader])
    assert proxy_of(loader) is None
    assert loader.batch_sampler is before


def test_a_proxy_has_the_length_and_attributes_of_what_it_stands_for() -> None:
    loader = rows(drop_last=True)
    watch([loader])
    proxy: Any = proxy_of(loader)
    assert (len(proxy), proxy.batch_size, proxy.drop_last) == (BATCHES, 4, True)
    with pytest.raises(AttributeError):
        _ = proxy.nothing_of_that_name


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("delivered", [0, 3, BATCHES])
def test_a_recorded_position_is_replayed_without_the_trainer(workers: int, delivered: int) -> None:
    L.seed_everything(1, verbose=False)
    loader = rows(num_workers=workers)
    watch([loader])
    batches = list(loader)
    records = position([loader], delivered)
    torch.rand(7)
    assert resume([loader], records)
    assert differences(list(loader), batches[delivered:]) == []
    assert len(list(loader)) == BATCHES, "the epoch after is a whole one"


def test_what_cannot_be_watched_is_recorded_as_plain_or_stateful() -> None:
    loaders = [DataLoader(Stream()), StatefulDataLoader(Rows()), [1, 2, 3]]
    watch(loaders)
    assert [record["kind"] for record in position(loaders, 2)] == ["plain", "stateful", "plain"]
    assert not resume(loaders, position(loaders, 2))
    assert [is_stateful(loader) for loader in loaders] == [False, True, False]


def test_a_loader_that_validates_too_keeps_its_position_in_training(tmp_path: Path) -> None:
    def run(folder: Path, seed: int, ckpt_path: str | None = None) -> Any:
        L.seed_everything(seed, verbose=False)
        loader, module = rows(), Tiny()
        keep = OverlappedCheckpoint(dirpath=folder, every_n_train_steps=4, save_top_k=-1, filename="{step}")
        fitted = trainer(keep, val_check_interval=2)
        fitted.fit(module, loader, loader, ckpt_path=ckpt_path)
        return module, fitted

    whole = run(tmp_path / "a", 3)
    assert_exact(whole, run(tmp_path / "b", 9, str(tmp_path / "a" / "step=4.ckpt")))


@pytest.mark.parametrize("step", [4, BATCHES])
def test_a_run_taken_over_from_a_plain_checkpoint_is_exact_from_then_on(tmp_path: Path, step: int) -> None:
    # Lightning starts the loader anew there, in the middle of an epoch or without counting the next one.
    plain = ModelCheckpoint(dirpath=tmp_path / "a", every_n_train_steps=step, save_top_k=-1, filename="{step}")
    fit(plain, max_steps=step)
    keep = OverlappedCheckpoint(dirpath=tmp_path / "b", every_n_train_steps=1, save_top_k=-1, filename="{step}")
    whole = fit(keep, ckpt_path=str(tmp_path / "a" / f"step={step}.ckpt"), fit_options={"weights_only": False})
    for later in (step + 1, BATCHES + 2):
        idle = OverlappedCheckpoint(dirpath=tmp_path / "c", every_n_train_steps=1000)
        assert_exact(whole, fit(idle, ckpt_path=str(tmp_path / "b" / f"step={later}.ckpt"), seed=5))
