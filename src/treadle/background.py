"""Run work in daemon threads and return futures."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


def in_background(name: str, work: Callable[[], T]) -> Future[T]:
    """Start `work` in a daemon thread of its own. The caller may stop waiting: `work` may block without a deadline."""
    future = Future[T]()
    future.set_running_or_notify_cancel()  # it cannot be cancelled
    threading.Thread(target=complete, args=(future, work), name=name, daemon=True).start()
    return future


class BackgroundWorker:
    """One daemon thread for recurring work, in order. Starting a thread costs about a millisecond in a busy process,
    handing work to a waiting thread does not."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._work: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = queue.SimpleQueue()
        self._is_running = False

    def submit(self, work: Callable[[], T]) -> Future[T]:
        if not self._is_running:
            threading.Thread(target=self._run, name=self._name, daemon=True).start()
            self._is_running = True
        future = Future[T]()
        future.set_running_or_notify_cancel()
        self._work.put((future, work))
        return future

    def _run(self) -> None:
        while True:
            complete(*self._work.get())


def complete(future: Future[T], work: Callable[[], T]) -> None:
    """Run `work` and set its result or error."""
    try:
        future.set_result(work())
    except BaseException as error:  # raised by future.result()
        future.set_exception(error)
