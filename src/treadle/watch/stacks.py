"""Write the stacks of all threads and asyncio tasks of this process to its log."""

from __future__ import annotations

import faulthandler
import signal
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any

from treadle.log import get_logger

if TYPE_CHECKING:
    import asyncio

log = get_logger("watchdog")

SIGNAL = signal.SIGUSR1
_STDERR = 2  # the descriptor: what Python calls its standard error may have been replaced
_lock = threading.Lock()
_loops: weakref.WeakSet[asyncio.AbstractEventLoop] = weakref.WeakSet()


def listen_for_signal() -> None:
    """Write the stacks on SIGUSR1, also while the process is stuck inside a library."""
    faulthandler.register(SIGNAL, file=_STDERR, all_threads=True)


def include_tasks_of(loop: asyncio.AbstractEventLoop) -> None:
    """Also list the tasks of this loop: a thread's stack does not show what its coroutines wait for."""
    _loops.add(loop)


def write_stacks(why: str) -> None:
    with _lock:
        log.warning("stacks", why=why)
        sys.stderr.flush()
        faulthandler.dump_traceback(file=_STDERR, all_threads=True)
        for loop in list(_loops):
            _write_tasks(loop)
        sys.stderr.flush()


def _write_tasks(loop: asyncio.AbstractEventLoop) -> None:
    import asyncio  # not above: every verb listens for the signal, and --help answers at once

    try:
        tasks = asyncio.all_tasks(loop)
    except RuntimeError:  # the set of tasks kept changing while it was read
        return
    places = Counter(" < ".join(reversed(list(_places(task.get_coro())))) for task in tasks)
    for place, count in places.most_common():
        sys.stderr.write(f"{count} task{'' if count == 1 else 's'} at {place or 'its beginning'}\n")


def _places(awaited: Any) -> Iterator[str]:
    """Function and line of each frame of a coroutine, down to the innermost one that it awaits."""
    while awaited is not None:
        kind = next((kind for kind in ("cr", "gi", "ag") if hasattr(awaited, f"{kind}_frame")), None)
        if kind is None:
            return
        frame: FrameType | None = getattr(awaited, f"{kind}_frame")
        if frame is not None:
            yield f"{frame.f_code.co_qualname} ({frame.f_code.co_filename}:{frame.f_lineno})"
        awaited = getattr(awaited, "gi_yieldfrom" if kind == "gi" else f"{kind}_await")
