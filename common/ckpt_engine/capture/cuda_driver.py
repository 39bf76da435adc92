"""The few calls of ``torch.cuda`` that the CUDA link is made of."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

_PORTABLE = 1
"""cudaHostRegisterPortable: pinned for every CUDA context of the process."""


class Driver(Protocol):
    """Streams and events of one device; streams and events are those of ``torch.cuda`` or behave like them."""

    def stream(self, *, urgent: bool) -> Any:
        """A new stream."""

    def current_stream(self) -> Any:
        """The calling thread's stream."""

    def event(self, *, timing: bool) -> Any:
        """An event not yet recorded; waiting for it on the host leaves the processor to others."""

    def on_device(self) -> AbstractContextManager[object]:
        """Makes the device current for a thread, so that nothing creates a context on device 0."""

    def copy(self, dst: Tensor, src: Tensor, stream: Any) -> None:
        """Put a copy on ``stream`` and return."""

    def lands(self, dst: Tensor, src: Tensor) -> bool:
        """Whether such a copy is a plain transfer into pinned memory, and so needs neither help nor the host."""

    def pinned_like(self, src: Tensor) -> Tensor:
        """A contiguous pinned host tensor."""

    def register(self, pointer: int, nbytes: int) -> int:
        """Pin host memory; returns 0 or the error's number."""

    def unregister(self, pointer: int) -> None:
        """Undo :meth:`register`."""


class CudaDriver:
    """The real calls.

    Args:
        device: A CUDA device; without an index it is the current one of the calling thread.
    """

    def __init__(self, device: torch.device) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        self._device = torch.device("cuda", index)

    def stream(self, *, urgent: bool) -> Any:
        """A new stream, ahead of others where it is urgent."""
        return torch.cuda.Stream(self._device, priority=-1 if urgent else 0)  # type: ignore[no-untyped-call]

    def current_stream(self) -> Any:
        """The calling thread's stream."""
        return torch.cuda.current_stream(self._device)

    def event(self, *, timing: bool) -> Any:
        """A blocking-sync event: the default spins on a core until it comes."""
        return torch.cuda.Event(enable_timing=timing, blocking=True)  # type: ignore[no-untyped-call]

    def on_device(self) -> AbstractContextManager[object]:
        """The device as the thread's current one."""
        return torch.cuda.device(self._device)

    def copy(self, dst: Tensor, src: Tensor, stream: Any) -> None:
        """Put a copy on ``stream``; the allocator learns that the stream reads ``src``."""
        with torch.cuda.stream(stream), torch.no_grad():
            # copy_ would conjugate or negate the target on the host at once, before the transfer has happened.
            dst.copy_(src.resolve_conj().resolve_neg(), non_blocking=True)
        src.record_stream(stream)

    def lands(self, dst: Tensor, src: Tensor) -> bool:
        """Pinned, and contiguous or laid out densely as the source is; else ``copy_`` goes through pageable memory."""
        return (dst.is_contiguous() or _alike(dst, src)) and dst.is_pinned()

    def pinned_like(self, src: Tensor) -> Tensor:
        """From the caching host allocator: cheap after the first."""
        return torch.empty(src.shape, dtype=src.dtype, pin_memory=True)

    def register(self, pointer: int, nbytes: int) -> int:
        """``cudaHostRegister``."""
        with self.on_device():
            error = int(torch.cuda.cudart().cudaHostRegister(pointer, nbytes, _PORTABLE))  # type: ignore[no-untyped-call]
            if error:
                self._forget_error()
        return error

    def unregister(self, pointer: int) -> None:
        """``cudaHostUnregister``."""
        with self.on_device():
            if int(torch.cuda.cudart().cudaHostUnregister(pointer)):  # type: ignore[no-untyped-call]
                self._forget_error()

    def _forget_error(self) -> None:
        # The runtime keeps a failed call's error for this thread, and training's next kernel launch would raise it:
        # let a launch of our own take it.
        try:
            torch.empty(1, device=self._device).fill_(0)
        except RuntimeError:
            return


def _alike(dst: Tensor, src: Tensor) -> bool:
    """Whether both are laid out densely and in the same way.

    Example:
        >>> _alike(torch.empty(3, 2).t(), torch.empty(3, 2).t()), _alike(torch.empty(3, 4)[:, :2], torch.empty(3, 2))
        (True, False)
    """
    return dst.stride() == src.stride() and torch.empty_like(dst, device="meta").stride() == dst.stride()
