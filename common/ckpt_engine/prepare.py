"""From a live state dict to a save request: what goes into the image, what is copied now, how it is named."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ckpt_engine.capture.units import ViewKey
from ckpt_engine.image.codec import encode
from ckpt_engine.image.layout import Layout, TensorSpec
from ckpt_engine.naming import Namer
from ckpt_engine.saves import Image


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """A state taken apart.

    Args:
        image: The image that holds most of it.
        tree: JSON-able state tree.
        extras: The tensors outside the image, copied.
        mode: How the image was, or will be, captured.
        stale: Names of attached tensors in whose place the state shows others: a buffer or parameter was replaced.
    """

    image: Image
    tree: object
    extras: dict[str, Tensor]
    mode: str
    stale: tuple[str, ...] = ()


def prepare(
    state: Mapping[str, object],
    *,
    image: Image | None,
    names: Mapping[ViewKey, str],
    copy_directly: Callable[[Mapping[str, Tensor]], Image],
    direct_mode: str,
) -> Prepared:
    """Take ``state`` apart: tensors that ``image`` holds stay with it, everything else is copied now.

    Args:
        state: Nested state dict with live tensors.
        image: The image of a window at its target; None when there is none.
        names: Names of the model's and the optimizers' tensors.
        copy_directly: Makes an image of the given tensors, now.
        direct_mode: Mode recorded for a direct copy.
    """
    window = image.window if image is not None else None
    namer = Namer(window.owned() if window is not None else {}, names)
    encoded = encode(state, namer)
    if namer.stale:
        current = {key: name for key, name in names.items() if name not in namer.stale}
        again = prepare(state, image=None, names=current, copy_directly=copy_directly, direct_mode=direct_mode)
        return replace(again, stale=namer.stale)
    if image is not None and window is not None and _covers(namer.in_image, image):
        extras = {name: t for name, t in encoded.tensors.items() if name not in namer.in_image}
        mode = "multi_step" if window.plan.steps > 1 else "one_step"
        return Prepared(image=image, tree=encoded.tree, extras=own(extras), mode=mode)
    chosen, extras = split(encoded.tensors)
    # The direct copy may have to wait for memory, which finishes other saves: small state first.
    owned = own(extras)
    return Prepared(image=copy_directly(chosen), tree=encoded.tree, extras=owned, mode=direct_mode)


def _covers(referenced: set[str], image: Image) -> bool:
    """Whether a state refers to the image's optimizer state; a weights-only save must not carry it."""
    optim = {spec.name for spec in image.layout.specs if spec.name.startswith("optim.")}
    return bool(referenced) and (not optim or not optim.isdisjoint(referenced))


def split(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Divide tensors into those of the image (model and optimizer) and the rest.

    Example:
        >>> import torch
        >>> image, extra = split({"model.w": torch.zeros(1), "extra.rng.torch": torch.zeros(1)})
        >>> list(image), list(extra)
        (['model.w'], ['extra.rng.torch'])
    """
    image = {name: t for name, t in tensors.items() if name.startswith(("model.", "optim."))}
    return image, {name: t for name, t in tensors.items() if name not in image}


def layout_of(tensors: Mapping[str, Tensor]) -> Layout:
    """Lay tensors out in the order given."""
    return Layout.build([TensorSpec(name, t.dtype, tuple(t.shape)) for name, t in tensors.items()])


def fill(layout: Layout, memory: Tensor, tensors: Mapping[str, Tensor]) -> None:
    """Write header and tensors into ``memory`` (uint8, at least ``layout.total_bytes``)."""
    memory[: layout.data_start].copy_(torch.frombuffer(bytearray(layout.header), dtype=torch.uint8))
    for name, view in layout.views(memory).items():
        view.copy_(tensors[name].detach())


def own(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copy small state to the host now, so that nothing aliases live memory."""
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
