"""Process identity: of the engine that a shared file belongs to, and of the trainer that publishes."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Annotated

import msgspec

PUBLISHER_HEADER = "Treadle-Publisher"  # of a trainer's requests to an engine


class Owner(msgspec.Struct, frozen=True, kw_only=True):
    """(pid, start time), because pids are reused."""

    pid: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
    started: int  # clock ticks after the machine did; 0 where that is not told (not on Linux)

    @property
    def is_alive(self) -> bool:
        """Whether that very process still runs, on this machine."""
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            pass  # it is somebody else's, and runs
        return self.started == _started(self.pid)


class Publisher(msgspec.Struct, frozen=True, kw_only=True):
    """The trainer process that publishes to an engine, and the run that it trains."""

    run: str  # its --save-path, and the host: a trainer that is started again has the same
    machine: str
    process: Owner

    def is_same_process(self, other: Publisher) -> bool:
        return (self.machine, self.process) == (other.machine, other.process)

    @property
    def may_be_gone(self) -> bool:
        """False only for a process that is known to run: one on this machine."""
        return self.machine != _machine() or not self.process.is_alive

    def as_header(self) -> str:
        return json.dumps(msgspec.to_builtins(self))  # a path may hold any character, a header only ASCII


def this_process() -> Owner:
    return Owner(pid=os.getpid(), started=_started(os.getpid()))


def this_publisher(save_path: Path) -> Publisher:
    run = f"{save_path.resolve()} on {socket.gethostname()}".encode(errors="replace").decode()
    return Publisher(run=run, machine=_machine(), process=this_process())


def read_publisher(header: str) -> Publisher:
    """Raises msgspec.DecodeError."""
    return msgspec.json.decode(header, type=Publisher)


def _machine() -> str:
    """Processes with the same one see each other by their pids: a container counts its own."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # not on Linux
        return socket.gethostname()


def _started(pid: int) -> int:
    """0 too for a process that has ended, and whose parent has not looked at it yet."""
    try:
        line = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    fields = line.rpartition(")")[2].split()  # a name in brackets comes before, and may hold anything
    return 0 if fields[0] in ("Z", "X") else int(fields[19])
