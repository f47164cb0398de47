"""Admit requests to vLLM, count them, and run changes (weights, adapters, restarts) one at a time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from treadle.engines.interface import Adapter
from treadle.log import get_logger

POLL_S = 1.0
T = TypeVar("T")
log = get_logger("engine")


class RequestCounters:
    """Counts completions that wait at the barrier or have been sent to vLLM, and the time spent generating."""

    def __init__(self) -> None:
        self.num_waiting = 0
        self.num_in_vllm = 0
        self.tokens = 0
        self._idle = asyncio.Event()  # set while vLLM has no request
        self._idle.set()
        self._seconds = 0.0
        self._since: float | None = None  # start of the current period of generation; None: idle or held

    def enter(self, count: int) -> None:
        self.num_in_vllm += count
        self._idle.clear()
        self.resume()

    def leave(self, count: int) -> None:
        self.num_in_vllm -= count
        if not self.num_in_vllm:
            self.pause()
            self._idle.set()

    async def wait_until_idle(self, timeout_s: float) -> bool:
        """Whether all requests in vLLM finished within the timeout."""
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    def resume(self) -> None:
        if self.num_in_vllm and self._since is None:
            self._since = time.monotonic()

    def pause(self) -> None:
        self._seconds, self._since = self.seconds(), None

    def seconds(self) -> float:
        return self._seconds + (0.0 if self._since is None else time.monotonic() - self._since)


@dataclass(frozen=True)
class Admission:
    """What an admitted request is served by."""

    model: str  # vLLM's name of the base model or the adapter
    adapter: Adapter | None
    first_version: int  # index into the list of base model versions
    cache_salt: str

    def versions(self, of_base: list[int]) -> list[int]:
        """Versions that may have sampled its tokens: that of the adapter, or the base model's since admission."""
        if self.adapter is not None and self.adapter.policy_version is not None:
            return [self.adapter.policy_version]
        return of_base[self.first_version :]


class RequestBarrier:
    """Requests wait here while weights change, the server restarts, or the engine is held.

    `check_alive` raises when the barrier will not open any more.
    """

    def __init__(self, counters: RequestCounters, check_alive: Callable[[], None]) -> None:
        self._counters = counters
        self._check_alive = check_alive
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
        """Wait until the barrier is open; `count`: completions of the request."""
        self._counters.num_waiting += count
        try:
            while not self.is_open:
                try:
                    await asyncio.wait_for(self._opened.wait(), timeout=POLL_S)
                except TimeoutError:
                    self._check_alive()
        finally:
            self._counters.num_waiting -= count


class ChangeQueue:
    """Runs changes of weights, adapters and the server one at a time, each to its end."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def is_busy(self) -> bool:
        return self._lock.locked()

    async def run(self, change: Callable[[], Coroutine[None, None, T]]) -> T:
        """Run a change and wait for it; it is finished even if the client disconnects."""
        begun = self.begin(change)
        try:
            return await asyncio.shield(begun)
        except asyncio.CancelledError:
            begun.add_done_callback(log_failure)
            raise

    def begin(self, change: Callable[[], Coroutine[None, None, T]]) -> asyncio.Task[T]:
        """`change` is called when its turn comes: an earlier one may replace the server."""

        async def run_exclusively() -> T:
            async with self._lock:
                return await change()

        task = asyncio.ensure_future(run_exclusively())
        self._tasks.add(task)  # the event loop keeps only weak references
        task.add_done_callback(self._tasks.discard)
        return task

    async def wait_until_idle(self, timeout_s: float) -> None:
        """Wait until no change runs or is queued, or until the timeout."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout_s)


def log_failure(change: asyncio.Task[Any]) -> None:
    """Done callback of a change whose result nobody awaits."""
    if not change.cancelled() and change.exception() is not None:
        log.warning("change_failed", reason=str(change.exception()))
