"""All random number streams that a training process draws from, as plain data.

The result holds only ints, strings, lists and tensors, so it is stored without pickle and is read back under
``weights_only=True``.

Example:
    >>> import random, torch
    >>> state = rng_state()
    >>> first = random.random(), torch.rand(2)
    >>> set_rng_state(state)
    >>> second = random.random(), torch.rand(2)
    >>> first[0] == second[0], torch.equal(first[1], second[1])
    (True, True)
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ckpt_engine.errors import StateMismatchError

if TYPE_CHECKING:
    from collections.abc import Iterator


def rng_state() -> dict[str, object]:
    """Return the state of the python, numpy, torch and accelerator generators of this process."""
    state: dict[str, object] = {
        "python": _python_state(),
        "numpy": _numpy_state(),
        "torch": torch.get_rng_state(),
    }
    state.update(_accelerator_states())
    return state


def set_rng_state(state: Mapping[str, object]) -> None:
    """Set every stream that :func:`rng_state` recorded.

    Streams of accelerators that this process does not have are left out: a checkpoint from another machine
    carries them, and there is nothing here to set.

    Raises:
        StateMismatchError: A stream of this process is missing from the record or has another form.
    """
    missing = sorted({"python", "numpy", "torch"} - set(state))
    if missing:
        raise StateMismatchError(f"The random state lacks {', '.join(missing)}: it was not written by rng_state().")
    _set_python(state["python"])
    _set_numpy(state["numpy"])
    torch.set_rng_state(_tensor(state["torch"]))
    _set_accelerators(state)


def same_streams(left: object, right: object) -> bool:
    """Whether two records of :func:`rng_state` are equal, that is, whether nobody drew in between.

    Example:
        >>> before = rng_state()
        >>> same_streams(before, rng_state())
        True
        >>> _ = torch.rand(1)
        >>> same_streams(before, rng_state())
        False
    """
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return torch.equal(left, right)
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        return left.keys() == right.keys() and all(same_streams(left[key], right[key]) for key in left)
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(same_streams, left, right))
    return left == right


@contextmanager
def forked_rng() -> Iterator[None]:
    """Run a block and put every stream back as it was."""
    state = rng_state()
    try:
        yield
    finally:
        set_rng_state(state)


def _python_state() -> dict[str, object]:
    version, words, gauss = random.getstate()
    return {"version": version, "words": torch.tensor(words, dtype=torch.int64), "gauss": gauss}


def _set_python(state: Any) -> None:
    words = tuple(int(word) for word in _tensor(state["words"]).tolist())
    random.setstate((state["version"], words, state["gauss"]))


def _numpy_state() -> dict[str, object]:
    name, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    return {
        "name": str(name),
        "keys": torch.from_numpy(np.asarray(keys).astype(np.int64)),
        "position": int(position),
        "has_gauss": int(has_gauss),
        "gauss": float(gauss),
    }


def _set_numpy(state: Any) -> None:
    keys = _tensor(state["keys"]).numpy().astype(np.uint32)
    np.random.set_state((state["name"], keys, state["position"], state["has_gauss"], state["gauss"]))


def _accelerator_states() -> dict[str, object]:
    """One list of tensors per backend that is present and started; a device never used has no stream yet."""
    states: dict[str, object] = {}
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states["cuda"] = torch.cuda.get_rng_state_all()
    if hasattr(torch, "xpu") and torch.xpu.is_available():
        states["xpu"] = torch.xpu.get_rng_state_all()
    if torch.backends.mps.is_available():
        states["mps"] = [torch.mps.get_rng_state()]
    return states


def _set_accelerators(state: Mapping[str, object]) -> None:
    if "cuda" in state and torch.cuda.is_available():
        _set_devices(state["cuda"], torch.cuda.device_count(), torch.cuda.set_rng_state)
    if "xpu" in state and hasattr(torch, "xpu") and torch.xpu.is_available():
        _set_devices(state["xpu"], torch.xpu.device_count(), torch.xpu.set_rng_state)
    if "mps" in state and torch.backends.mps.is_available():
        torch.mps.set_rng_state(_tensor(_list(state["mps"])[0]))


def _set_devices(states: object, count: int, setter: Any) -> None:
    for index, device_state in enumerate(_list(states)[:count]):
        setter(_tensor(device_state), index)


def _list(value: object) -> list[object]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _tensor(value: object) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise StateMismatchError(f"A random stream is a {type(value).__name__} where a tensor belongs.")
    # A copy is aligned; torch reads a generator state as a struct and crashes on an odd address.
    return value.detach().cpu().clone()
