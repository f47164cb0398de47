"""Stopping in order: SIGTERM and SIGINT ask, and the loop obeys where its state is whole."""

from __future__ import annotations

import signal
from types import FrameType


class StopRequested(Exception):
    """Raised between two pieces of work after someone asked the trainer to stop."""


class StopSwitch:
    def __init__(self) -> None:
        self._requested = False

    def install(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._request)

    def check(self) -> None:
        if self._requested:
            raise StopRequested

    def _request(self, number: int, frame: FrameType | None) -> None:
        self._requested = True
