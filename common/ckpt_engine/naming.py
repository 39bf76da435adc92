"""Names of tensors in a checkpoint: ``model.<fqn>``, ``optim.<fqn>.<key>`` and ``extra.<path>`` for the rest."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from ckpt_engine.capture.units import ViewKey, is_plain, view_key


def name_of_path(path: str) -> str:
    """Name a tensor by its place in a framework's checkpoint.

    Example:
        >>> name_of_path("state_dict.encoder.weight")
        'model.encoder.weight'
        >>> name_of_path("optimizer_states.0.state.3.exp_avg")
        'optim.0.state.3.exp_avg'
        >>> name_of_path("callbacks.ema.decay")
        'extra.callbacks.ema.decay'
    """
    for prefix, replacement in (("state_dict.", "model."), ("optimizer_states.", "optim.")):
        if path.startswith(prefix):
            return replacement + path[len(prefix) :]
    return f"extra.{path}"


class Namer:
    """Names the tensors of one state: by identity where the engine knows them, by path otherwise.

    Args:
        owned: Image names by the memory that a live tensor shows.
        known: Names of other tensors of the model (buffers), likewise.
    """

    def __init__(self, owned: Mapping[ViewKey, str], known: Mapping[ViewKey, str]) -> None:
        self._owned = owned
        self._known = known
        self._used: dict[str, ViewKey | int] = {}
        self.in_image: set[str] = set()

    def __call__(self, tensor: Tensor, path: str) -> str:
        key = view_key(tensor) if is_plain(tensor) else None
        if key is not None and tensor.numel() and key in self._owned:
            name = self._owned[key]
            self.in_image.add(name)
            return self._claim(name, key)
        known = self._known.get(key) if key is not None and tensor.numel() else None
        return self._claim(known or name_of_path(path), key if key is not None else id(tensor))

    def _claim(self, name: str, owner: ViewKey | int) -> str:
        candidate, count = name, 1
        while self._used.setdefault(candidate, owner) != owner:
            count += 1
            candidate = f"{name}~{count}"
        return candidate
