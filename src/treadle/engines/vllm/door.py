"""Where requests wait while weights change, the server restarts, or somebody holds the engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from treadle.engines.vllm.meter import Meter

LOOK_S = 1.0


class Door:
    """`refuse_vain_wait` raises when nobody will open it any more."""

    def __init__(self, meter: Meter, refuse_vain_wait: Callable[[], None]) -> None:
        self._meter = meter
        self._refuse_vain_wait = refuse_vain_wait
        self._opened = asyncio.Event()
        self._opened.set()

    @property
    def is_open(self) -> bool:
        return self._opened.is_set()

    def open(self) -> None:
        self._opened.set()

    def close(self) -> None:
        self._opened.clear()

    async def wait(self, count: int) -> None:
        """Until it is open; `count` completions are asked for."""
        self._meter.at_door += count
        try:
            while not self.is_open:
                try:
                    await asyncio.wait_for(self._opened.wait(), timeout=LOOK_S)
                except TimeoutError:
                    self._refuse_vain_wait()
        finally:
            self._meter.at_door -= count
