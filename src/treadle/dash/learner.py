"""A thread that reads facts out of the groups while somebody looks for them, in portions that hold nobody up."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable

import msgspec

from treadle.log import get_logger
from treadle.store.browse import Browser

PORTION = 25  # groups; a search waits for one portion at most
log = get_logger("page")


class Learner:
    """`first` is done once, at the start: what the first look would else wait for."""

    def __init__(self, browser: Browser, first: Callable[[], object]) -> None:
        self._browser = browser
        self._first = first
        self._is_asked = threading.Event()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._work, name="page-learner", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        self._is_asked.set()

    def close(self) -> None:
        self._is_over.set()
        self._is_asked.set()
        self._thread.join()

    def _work(self) -> None:
        try:
            self._first()
        except OSError:  # whoever asks for it is told
            log.error("figures_not_read", exc_info=True)
        while self._is_asked.wait() and not self._is_over.is_set():
            self._is_asked.clear()
            try:
                while self._browser.learn(PORTION) and not self._is_over.is_set():
                    self._is_over.wait(0.0005)  # others get the lock and the interpreter in between
            except (sqlite3.Error, msgspec.DecodeError):  # busy, being reset or damaged: the next look asks again
                log.error("facts_not_read", exc_info=True)
