"""Stop in order: SIGTERM and SIGINT ask, and the loop obeys where its state is consistent."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from treadle.log import get_logger

GRACE_S = 30.0  # for a computation to come to its end
log = get_logger("trainer")


class StopRequested(Exception):
    """Raised between two pieces of work after someone asked the trainer to stop."""


class StopSwitch:
    """Turns signals into StopRequested, raised by `check`.

    A single forward and backward can take minutes: of a large model, or in a number format that the processor does not
    have. When one goes on for longer than `grace_s` after the request, the process ends without it. That loses
    nothing but time: the next life goes on from the last checkpoint, with the same batches.
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
        """Around work of which nothing is kept before it ends."""
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
