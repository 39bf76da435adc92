"""The exact position in the training data, without fetching what was already consumed.

Lightning restarts an epoch's data when it resumes in the middle of one. Here each DataLoader's (batch) sampler is
wrapped by a proxy that remembers the random streams as they were when an iterator was made and when its first index
was drawn (``RandomSampler`` draws its seed lazily, and the workers' base seed is drawn in between). On resume the
sampler is replayed from those streams and the indices of consumed batches are thrown away: no item is fetched or
collated for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from ckpt_engine.capture.rng import forked_rng, rng_state, set_rng_state

Streams = dict[str, Any]


class SamplerProxy:
    """Stands in for a loader's batch sampler (or sampler) and can replay it.

    Args:
        inner: The real one.
        loader: The loader that it belongs to; its generators are part of the streams.
        recording: Whether an iterator made now is one for training; the same loader may serve validation too.
    """

    def __init__(self, inner: Any, loader: Any, recording: Callable[[], bool] = lambda: True) -> None:
        self.inner = inner
        self.iterations = 0
        self.offset = 0
        self.at_iter: Streams | None = None
        self.at_first: Streams | None = None
        self._loader = loader
        self._recording = recording
        self._skip: int | None = None

    def __getattr__(self, name: str) -> Any:
        if name == "inner":
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __len__(self) -> int:
        return len(self.inner)

    def __iter__(self) -> Iterator[Any]:
        if not self._recording():
            return iter(self.inner)
        # A loader with workers asks for two iterators and draws from the second: only one that is drawn from counts.
        if self._skip is not None:
            return self._replay(self._skip)
        at_iter = streams(self._loader, self.inner)
        return self._follow(iter(self.inner), at_iter)

    def resume(self, record: Mapping[str, Any]) -> None:
        """The next iterator continues behind ``record["delivered"]`` batches of the recorded one."""
        self.at_iter, self.at_first = record["at_iter"], record["at_first"]
        self.iterations, self.offset = int(record["iterations"]), int(record["offset"])
        self._skip = int(record["delivered"])

    def _follow(self, iterator: Iterator[Any], at_iter: Streams) -> Iterator[Any]:
        self.iterations += 1
        self.at_iter, self.at_first = at_iter, streams(self._loader, self.inner)
        yield from iterator

    def _replay(self, skip: int) -> Iterator[Any]:
        assert self.at_iter is not None
        assert self.at_first is not None
        generators = _generators(self._loader, self.inner)
        set_streams(self.at_iter, self._loader, self.inner)
        iterator = iter(self.inner)
        at_iter = _states(generators)
        # The loader draws its base seed next, from the streams as they are now; the sampler's own draws came later.
        with forked_rng():
            set_streams(self.at_first, self._loader, self.inner)
            for _ in range(skip):
                next(iterator, None)
            # One more is drawn ahead so that a sampler's lazy seed is drawn from its own streams even when skip is 0.
            ahead = [item for item in [next(iterator, _END)] if item is not _END]
            behind = _states(generators)
        _set_states(generators, at_iter)
        return self._continue(ahead, iterator, generators, behind)

    def _continue(
        self,
        ahead: Sequence[Any],
        rest: Iterator[Any],
        generators: Sequence[torch.Generator],
        states: Sequence[torch.Tensor],
    ) -> Iterator[Any]:
        self._skip = None
        _set_states(generators, states)
        yield from ahead
        yield from rest


_END = object()


def streams(loader: Any, sampler: Any) -> Streams:
    """The global random streams and those of the loader's own generators."""
    return {"rng": rng_state(), "generators": _states(_generators(loader, sampler))}


def set_streams(record: Streams, loader: Any, sampler: Any) -> None:
    """Set what :func:`streams` recorded."""
    set_rng_state(record["rng"])
    _set_states(_generators(loader, sampler), record["generators"])


def _states(generators: Sequence[torch.Generator]) -> list[torch.Tensor]:
    return [generator.get_state() for generator in generators]


def _set_states(generators: Sequence[torch.Generator], states: Sequence[torch.Tensor]) -> None:
    for generator, state in zip(generators, states, strict=True):
        generator.set_state(state.clone())


def _generators(loader: Any, sampler: Any) -> list[torch.Generator]:
    owners = [loader, sampler, getattr(sampler, "sampler", None)]
    found = [getattr(owner, "generator", None) for owner in owners]
    return list({id(g): g for g in found if isinstance(g, torch.Generator)}.values())


def is_stateful(loader: Any) -> bool:
    """Whether a loader keeps its own position (``state_dict`` and ``load_state_dict``)."""
    return callable(getattr(loader, "state_dict", None)) and callable(getattr(loader, "load_state_dict", None))


def _slot(loader: Any) -> str | None:
    """The attribute through which a map-style DataLoader draws its indices."""
    if not isinstance(loader, DataLoader) or is_stateful(loader) or isinstance(loader.dataset, IterableDataset):
        return None
    return "sampler" if loader.batch_sampler is None else "batch_sampler"


def watch(loaders: Sequence[Any], recording: Callable[[], bool] = lambda: True) -> None:
    """Wrap the samplers of map-style loaders; a loader that is watched already is left alone.

    Args:
        loaders: The training loaders.
        recording: Whether an iterator made now is one for training.
    """
    for loader in loaders:
        slot = _slot(loader)
        if slot is not None and not isinstance(getattr(loader, slot), SamplerProxy):
            # DataLoader refuses assignment to these attributes after construction.
            loader.__dict__[slot] = SamplerProxy(getattr(loader, slot), loader, recording)


def unwatch(loaders: Sequence[Any]) -> None:
    """Take the proxies off again."""
    for loader in loaders:
        slot = _slot(loader)
        if slot is not None and isinstance(getattr(loader, slot), SamplerProxy):
            loader.__dict__[slot] = getattr(loader, slot).inner


def proxy_of(loader: Any) -> SamplerProxy | None:
    """The proxy of a watched loader."""
    slot = _slot(loader)
    sampler = getattr(loader, slot) if slot is not None else None
    return sampler if isinstance(sampler, SamplerProxy) else None


def position(loaders: Sequence[Any], delivered: int) -> list[dict[str, Any]]:
    """Where each loader is after ``delivered`` batches of the epoch.

    A shorter loader of several starts again when it is exhausted: its own count is what its last iterator delivered.
    """
    records = []
    for loader in loaders:
        proxy = proxy_of(loader)
        if proxy is None or proxy.at_iter is None:
            kind = "stateful" if is_stateful(loader) else "plain"
            records.append({"kind": kind, "delivered": delivered})
            continue
        earlier = (proxy.iterations - 1) * len(loader) if proxy.iterations > 1 else 0
        records.append(
            {
                "kind": "sampler",
                "delivered": delivered - earlier - proxy.offset,
                "iterations": proxy.iterations,
                "offset": proxy.offset,
                "at_iter": proxy.at_iter,
                "at_first": proxy.at_first,
            }
        )
    return records


def counts(loaders: Sequence[Any]) -> list[int]:
    """How many iterators each loader has begun so far, to be passed to :func:`new_epoch`."""
    return [proxy.iterations if (proxy := proxy_of(loader)) is not None else 0 for loader in loaders]


def new_epoch(loaders: Sequence[Any], before: Sequence[int]) -> None:
    """Count iterators from the beginning of an epoch: ``before`` of them were of an earlier one, or never used.

    Loaders with workers draw from a new iterator at once, so this is known only afterwards.
    """
    for loader, count in zip(loaders, before, strict=True):
        proxy = proxy_of(loader)
        if proxy is not None:
            proxy.iterations -= count
            proxy.offset = 0


def starts_anew(loaders: Sequence[Any], delivered: int) -> None:
    """Lightning counts ``delivered`` batches of this epoch, but the loaders start at their beginning.

    So it resumes from a checkpoint that holds no position.
    """
    for loader in loaders:
        proxy = proxy_of(loader)
        if proxy is not None:
            proxy.offset = delivered


def resume(loaders: Sequence[Any], records: Sequence[Mapping[str, Any]]) -> bool:
    """Make the loaders' next iterators continue where ``records`` say; True when new iterators are needed."""
    needed = False
    for loader, record in zip(loaders, records, strict=False):
        proxy = proxy_of(loader)
        if proxy is not None and record["kind"] == "sampler":
            proxy.resume(record)
            needed = True
    return needed
