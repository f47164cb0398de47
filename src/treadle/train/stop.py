"""Turn SIGTERM and SIGINT into StopRequested, raised where the trainer's state is consistent."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from treadle.log import get_logger

GRACE_S = 30.0  # for a running computation to finish
log = get_logger("trainer")


class StopRequested(Exception):
    """Raised between two pieces of work after a stop was requested."""


class StopSwitch:
    """Turns signals into StopRequested, raised by `check`.

    A single forward and backward pass can take minutes: for a large model, or in a number format that the CPU emulates.
    If one runs for longer than `grace_s` after the request, the process exits without it. Only time is lost: the next
    start resumes from the last checkpoint with the same batches.
    """

    def __init__(self, grace_s: float = GRACE_S) -> None:
        self._requested = False
        self._grace_s = grace_s
        self._num_computing = 0

    def install(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._request)

    def check(self) -> None:
        if self._requested:
            raise StopRequested

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Around work whose intermediate results are discarded on a stop."""
        self._num_computing += 1
        try:
            yield
        finally:
            self._num_computing -= 1

    def _request(self, number: int, frame: FrameType | None) -> None:
        if not self._requested:
            threading.Thread(target=self._end_computing, name="stop", daemon=True).start()
        self._requested = True

    def _end_computing(self) -> None:
        time.sleep(self._grace_s)
        if self._num_computing:
            log.warning("stopped", reason="asked to", given_up="a computation that went on", seconds=self._grace_s)
            os._exit(0)
