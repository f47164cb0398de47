"""Changes of weights, adapters and the server itself: one after the other, and none is left halfway."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from treadle.log import get_logger

T = TypeVar("T")
log = get_logger("engine")


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
