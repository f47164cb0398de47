"""Admit requests to vLLM, count them, and run changes (weights, adapters, restarts) one at a time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from treadle.engines.interface import Adapter
from treadle.log import get_logger

LOOK_S = 1.0
T = TypeVar("T")
log = get_logger("engine")


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


class ChangeLine:
    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def is_busy(self) -> bool:
        return self._turn.locked()

    async def make(self, change: Coroutine[None, None, T]) -> T:
        """Whoever asked may leave (a client that hangs up): a change that was begun is finished."""
        begun = self.begin(change)
        try:
            return await asyncio.shield(begun)
        except asyncio.CancelledError:
            begun.add_done_callback(tell_failure)
            raise

    def begin(self, change: Coroutine[None, None, T]) -> asyncio.Task[T]:
        async def one_at_a_time() -> T:
            async with self._turn:
                return await change

        task = asyncio.ensure_future(one_at_a_time())
        self._tasks.add(task)  # the event loop keeps only weak references
        task.add_done_callback(self._tasks.discard)
        return task

    async def wait_until_idle(self, timeout_s: float) -> None:
        """Or until the time is over."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout_s)


def tell_failure(change: asyncio.Task[Any]) -> None:
    """For a change that nobody waits for any more."""
    if not change.cancelled() and change.exception() is not None:
        log.warning("change_failed", reason=str(change.exception()))
