"""Work in a thread whose result is waited for, or not."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


def in_background(name: str, work: Callable[[], T]) -> Future[T]:
    """In a thread that nobody has to wait for: what it stands in may have no deadline of its own."""
    future = Future[T]()
    future.set_running_or_notify_cancel()  # who no longer waits for it cannot undo it
    threading.Thread(target=_settle, args=(future, work), name=name, daemon=True).start()
    return future


class Background:
    """One such thread for work that comes again and again, one after the other. To start a thread is to wait until it
    runs, a millisecond in a process that computes; to hand work to one that waits is not."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._work: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = queue.SimpleQueue()
        self._is_running = False

    def begin(self, work: Callable[[], T]) -> Future[T]:
        if not self._is_running:
            threading.Thread(target=self._run, name=self._name, daemon=True).start()
            self._is_running = True
        future = Future[T]()
        future.set_running_or_notify_cancel()
        self._work.put((future, work))
        return future

    def _run(self) -> None:
        while True:
            _settle(*self._work.get())


def _settle(future: Future[T], work: Callable[[], T]) -> None:
    try:
        future.set_result(work())
    except BaseException as error:  # it is raised where the result is asked for
        future.set_exception(error)
