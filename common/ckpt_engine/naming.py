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

    The engine's names are reserved: a state may hold other tensors where the model's are expected (averaged weights in
    ``state_dict``) and the model's own in another place.

    Args:
        owned: Image names by the memory that a live tensor shows.
        known: Names of other tensors of the model (buffers), likewise.

    Attributes:
        in_image: Names of the owned tensors that the state refers to.
    """

    def __init__(self, owned: Mapping[ViewKey, str], known: Mapping[ViewKey, str]) -> None:
        self._names = {**known, **owned}
        self._owned = owned
        self._used: dict[str, ViewKey | int] = {name: key for key, name in self._names.items()}
        self._met: set[str] = set()
        self._displaced: dict[str, None] = {}
        self.in_image: set[str] = set()

    def __call__(self, tensor: Tensor, path: str) -> str:
        key = view_key(tensor) if is_plain(tensor) else None
        name = self._names.get(key) if key is not None and tensor.numel() else None
        if name is None:
            return self._claim(name_of_path(path), key if key is not None else id(tensor))
        assert key is not None
        self._met.add(name)
        if key in self._owned:
            self.in_image.add(name)
        return self._claim(name, key)

    @property
    def stale(self) -> tuple[str, ...]:
        """Names whose tensor the state does not hold, while it holds another in its place: it was replaced."""
        return tuple(name for name in self._displaced if name not in self._met)

    def _claim(self, name: str, owner: ViewKey | int) -> str:
        candidate, count = name, 1
        while self._used.setdefault(candidate, owner) != owner:
            self._displaced[name] = None
            count += 1
            candidate = f"{name}~{count}"
        return candidate
