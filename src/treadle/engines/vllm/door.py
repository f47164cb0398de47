"""Where requests wait while weights change, the server restarts, or somebody holds the engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from treadle.engines.port import Adapter
from treadle.engines.vllm.meter import Meter

LOOK_S = 1.0


@dataclass(frozen=True)
class Pass:
    """A request's way through the door: what it is served by."""

    model: str  # vLLM's name of it
    adapter: Adapter | None
    first_version: int  # its place in the list of the base model's versions
    cache_salt: str

    def versions(self, of_base: list[int]) -> list[int]:
        """What the tokens until now may have come from: an adapter's one version, or those of the base model since."""
        if self.adapter is not None and self.adapter.policy_version is not None:
            return [self.adapter.policy_version]
        return of_base[self.first_version :]


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
