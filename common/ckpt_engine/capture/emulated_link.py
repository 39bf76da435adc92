"""A link of given bandwidth: real copies behind a token bucket, so that overlap can be measured without a GPU."""

from __future__ import annotations

import time
from collections.abc import Callable

from ckpt_engine.capture.host_link import HostLink
from ckpt_engine.errors import ConfigError


class EmulatedLink(HostLink):
    """A :class:`HostLink` that moves at most ``bytes_per_s``.

    Args:
        bytes_per_s: The emulated bandwidth.
        clock: Seconds, monotonic.
        sleep: Waits for some seconds.

    Example:
        >>> import torch
        >>> from ckpt_engine.capture.link import Copy
        >>> now = [0.0]
        >>> link = EmulatedLink(1e6, clock=lambda: now[0], sleep=lambda s: now.__setitem__(0, now[0] + s))
        >>> source = torch.zeros(500_000, dtype=torch.uint8)
        >>> ticket = link.submit([Copy(torch.empty_like(source), source)])
        >>> ticket.wait(10)
        >>> round(now[0], 3)
        0.5
        >>> link.close()
    """

    def __init__(
        self,
        bytes_per_s: float,
        *,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        if not bytes_per_s > 0:
            raise ConfigError(f"bytes_per_s={bytes_per_s!r} must be above 0: give the bandwidth to emulate.")
        super().__init__(throttle=self._wait_for_tokens, clock=clock)
        self._bytes_per_s = bytes_per_s
        self._sleep = sleep
        self._free_at = clock()

    def _wait_for_tokens(self, nbytes: int) -> None:
        # The wire is busy until `free_at`; a piece arrives when the wire has carried it.
        now = self._clock()
        self._free_at = max(self._free_at, now) + nbytes / self._bytes_per_s
        if self._free_at > now:
            self._sleep(self._free_at - now)
