"""Counters of the engine's own: vLLM's would cost a call, and know nothing of who waits at our door."""

from __future__ import annotations

import asyncio
import time


class Meter:
    """How much runs and waits, and for how long something has been generated."""

    def __init__(self) -> None:
        self.at_door = 0
        self.in_vllm = 0
        self.tokens = 0
        self._idle = asyncio.Event()  # nothing was sent to vLLM that is not answered
        self._idle.set()
        self._seconds = 0.0
        self._since: float | None = None  # generating since; None: nothing runs, or it is held

    def enter(self, count: int) -> None:
        self.in_vllm += count
        self._idle.clear()
        self.go_on()

    def leave(self, count: int) -> None:
        self.in_vllm -= count
        if not self.in_vllm:
            self.stop()
            self._idle.set()

    async def wait_until_idle(self, timeout_s: float) -> bool:
        """Whether everything that was sent is answered now."""
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    def go_on(self) -> None:
        if self.in_vllm and self._since is None:
            self._since = time.monotonic()

    def stop(self) -> None:
        self._seconds, self._since = self.seconds(), None

    def seconds(self) -> float:
        return self._seconds + (0.0 if self._since is None else time.monotonic() - self._since)
