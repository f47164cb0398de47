"""Work in a thread whose result is waited for, or not."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def in_background(name: str, work: Callable[[], T]) -> Future[T]:
    """In a thread that nobody has to wait for: what it stands in may have no deadline of its own."""
    future = Future[T]()
    future.set_running_or_notify_cancel()  # who no longer waits for it cannot undo it

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # it is raised where the result is asked for
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future
