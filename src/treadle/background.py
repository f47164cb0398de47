"""Threads that run beside the main work of a process, and time that leaves out its pauses.

in_background, BackgroundWorker   run work in daemon threads and return futures
awake_s                           monotonic clock for deadlines of others; a thread keeps it going
end_with_parent                   end this process when its launcher is gone, even after kill -9: there are no orphans
"""

from __future__ import annotations

import os
import queue
import signal
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")
Work = tuple[Future[Any], Callable[[], Any]] | None  # None ends a thread


def in_background(name: str, work: Callable[[], T]) -> Future[T]:
    """Start `work` in a daemon thread of its own. The caller may stop waiting: `work` may block without a deadline."""
    future = Future[T]()
    future.set_running_or_notify_cancel()  # it cannot be cancelled
    threading.Thread(target=complete, args=(future, work), name=name, daemon=True).start()
    return future


class BackgroundWorker:
    """One daemon thread, or `num_threads`, for recurring work; one thread takes it in order. Starting a thread costs
    about a millisecond in a busy process, handing work to a waiting thread does not. The threads end when nothing
    refers to the worker any more."""

    def __init__(self, name: str, num_threads: int = 1) -> None:
        self._name = name
        self._work: queue.SimpleQueue[Work] = queue.SimpleQueue()
        self._num_to_start = num_threads
        weakref.finalize(self, self._work.put, None)

    def submit(self, work: Callable[[], T]) -> Future[T]:
        if self._num_to_start:
            threading.Thread(target=_work_until_none, args=(self._work,), name=self._name, daemon=True).start()
            self._num_to_start -= 1
        future = Future[T]()
        future.set_running_or_notify_cancel()
        self._work.put((future, work))
        return future


def _work_until_none(work: queue.SimpleQueue[Work]) -> None:
    while True:
        item = work.get()
        if item is None:  # nobody can submit any more
            work.put(None)  # for the other threads
            return
        complete(*item)
        del item  # it may be what refers to the worker


def complete(future: Future[T], work: Callable[[], T]) -> None:
    """Run `work` and set its result or error."""
    try:
        future.set_result(work())
    except BaseException as error:  # raised by future.result()
        future.set_exception(error)


# ---- clock

TICK_S = 0.25
LONGEST_STEP_S = 1.0  # that the clock may take between two readings; longer was a pause


class _AwakeClock:
    """A process that is stopped (Ctrl-Z, SIGSTOP), or whose virtual machine is paused, receives nothing. Deadlines for
    others are measured by this clock, so that a pause does not count against them."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        self._lock = threading.Lock()
        self._read_at_s = self._awake_s = time.monotonic()
        self._ticker: threading.Thread | None = None

    def __call__(self) -> float:
        """Seconds since some moment during which this process ran."""
        with self._lock:
            if self._ticker is None:
                self._ticker = threading.Thread(target=self._tick, name="awake-clock", daemon=True)
                self._ticker.start()
            now_s = time.monotonic()
            self._awake_s += min(now_s - self._read_at_s, LONGEST_STEP_S)
            self._read_at_s = now_s
            return self._awake_s

    def _tick(self) -> None:
        """Read the clock where nobody else does: without readings an idle process would seem to be paused."""
        while True:
            time.sleep(TICK_S)
            self()


awake_s = _AwakeClock()
os.register_at_fork(after_in_child=awake_s.begin)  # threads do not survive a fork


# ---- parent

PARENT_VARIABLE = "TREADLE_PARENT_PID"  # set by the launcher in the processes that it starts
PARENT_ELSEWHERE = ""  # it is on another machine; a scheduler ends what it leaves


def end_with_parent() -> None:
    """Watch the launcher in a thread; does nothing in a process that no launcher on this machine started."""
    parent = os.environ.get(PARENT_VARIABLE)
    if parent is None or parent == PARENT_ELSEWHERE:
        return

    def watch() -> None:
        while os.getppid() == int(parent):
            time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)
        os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()
