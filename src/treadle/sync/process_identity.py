"""Identify processes: the engine that owns a shared file, and the trainer that publishes to an engine."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Annotated

import msgspec

PUBLISHER_HEADER = "Treadle-Publisher"  # sent with a trainer's requests to an engine


class ProcessIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """(pid, start time), because pids are reused."""

    pid: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
    started: int  # clock ticks since boot; 0 where this is unknown (not on Linux)

    @property
    def is_alive(self) -> bool:
        """Whether this process still runs, on this machine."""
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            pass  # it runs as another user
        return self.started == _started(self.pid)


class Publisher(msgspec.Struct, frozen=True, kw_only=True):
    """The trainer process that publishes to an engine, and the run that it trains."""

    run: str  # --save-path and host: the same after a restart of the trainer
    machine: str
    process: ProcessIdentity

    def is_same_process(self, other: Publisher) -> bool:
        return (self.machine, self.process) == (other.machine, other.process)

    @property
    def may_be_gone(self) -> bool:
        """False only for a live process on this machine."""
        return self.machine != _machine() or not self.process.is_alive

    def as_header(self) -> str:
        return json.dumps(msgspec.to_builtins(self))  # JSON escapes non-ASCII characters of a path


def this_process() -> ProcessIdentity:
    return ProcessIdentity(pid=os.getpid(), started=_started(os.getpid()))


def this_publisher(save_path: Path) -> Publisher:
    run = f"{save_path.resolve()} on {socket.gethostname()}".encode(errors="replace").decode()
    return Publisher(run=run, machine=_machine(), process=this_process())


def read_publisher(header: str) -> Publisher:
    """Raises msgspec.DecodeError."""
    return msgspec.json.decode(header, type=Publisher)


def _machine() -> str:
    """Equal for processes that share PIDs: the same boot and PID namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # not on Linux
        return socket.gethostname()


def _started(pid: int) -> int:
    """Start time in clock ticks; 0 for a process that has ended, even if it was not reaped yet."""
    try:
        line = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    fields = line.rpartition(")")[2].split()  # the command name in brackets may contain anything
    return 0 if fields[0] in ("Z", "X") else int(fields[19])
