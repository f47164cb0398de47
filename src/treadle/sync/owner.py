"""Which process a shared file belongs to: its number, and when it began, because numbers are used again."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec


class Owner(msgspec.Struct, frozen=True, kw_only=True):
    pid: int
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


def this_process() -> Owner:
    return Owner(pid=os.getpid(), started=_started(os.getpid()))


def _started(pid: int) -> int:
    try:
        line = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    return int(line.rpartition(")")[2].split()[19])  # a name in brackets comes before, and may hold anything
