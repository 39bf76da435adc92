"""Who writes into a staging directory, so that only what a dead process left behind is ever swept away."""

from __future__ import annotations

import json
import os
import socket
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

Liveness = Literal["alive", "dead", "unknown"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Owner:
    """One process, told apart from any later one with the same number.

    Args:
        host: Its host's name.
        boot: The kernel's boot id: process numbers start again after a reboot.
        pid_space: The pid namespace: containers on one host number their processes apart.
        pid: The process number.
        started: Its start in clock ticks after boot; the same number with another start is another process.
    """

    host: str
    boot: str
    pid_space: str
    pid: int
    started: str

    @classmethod
    def current(cls) -> Owner:
        """The calling process.

        >>> Owner.current().liveness()
        'alive'
        """
        return cls(
            host=socket.gethostname(),
            boot=_boot_id(),
            pid_space=_pid_space(),
            pid=os.getpid(),
            started=_start_of(os.getpid()) or "",
        )

    @classmethod
    def from_bytes(cls, data: bytes) -> Owner:
        """Raises ValueError for anything that :meth:`to_bytes` did not write."""
        try:
            fields = json.loads(data)
            owner = cls(**fields)
        except (TypeError, RecursionError) as error:
            raise ValueError(f"not an owner record: {error}") from error
        if not isinstance(owner.pid, int):
            raise ValueError("not an owner record: the process number is no integer")
        return owner

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self), sort_keys=True).encode()

    def liveness(self) -> Liveness:
        """Whether the process still runs; ``unknown`` for one of another host, boot or pid namespace."""
        here = (socket.gethostname(), _boot_id(), _pid_space())
        if (self.host, self.boot, self.pid_space) != here:
            return "unknown"
        return "alive" if _start_of(self.pid) == self.started else "dead"


def _start_of(pid: int) -> str | None:
    """Start of a process in clock ticks after boot; None if there is none, or only its zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in ("Z", "X") else fields[19]


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _pid_space() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""
