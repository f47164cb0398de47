"""The bounded line of calls that wait for a worker."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from treadle.envs.rewards.outcome import CallResult
from treadle.errors import TreadleError


@dataclass(eq=False)
class Batch:
    """The calls of one reward that one caller waits for."""

    key: int  # of the reward
    config: dict[str, Any]
    calls: Sequence[msgspec.Raw]  # what each call is given
    done: asyncio.Future[None]
    results: dict[int, CallResult] = field(default_factory=dict)  # by place

    def apply_group_rules(self, place: int, result: CallResult) -> None:
        self.results[place] = result
        if len(self.results) == len(self.calls) and not self.done.done():
            self.done.set_result(None)

    def fail(self, error: Exception) -> None:
        if not self.done.done():
            self.done.set_exception(error)


@dataclass(frozen=True, eq=False)
class Call:
    batch: Batch
    place: int

    @property
    def inputs(self) -> msgspec.Raw:
        return self.batch.calls[self.place]

    @property
    def is_wanted(self) -> bool:
        """Its caller still waits."""
        return not self.batch.done.done()

    def apply_group_rules(self, result: CallResult) -> None:
        self.batch.apply_group_rules(self.place, result)


class CallLine:
    """First come, first served. `put` waits while the line is full, so that callers feel how busy the workers are."""

    def __init__(self, max_waiting: int) -> None:
        self._calls: deque[Call] = deque()
        self._room = asyncio.Semaphore(max_waiting)
        self._arrived = asyncio.Event()
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._calls)

    async def put(self, batch: Batch) -> None:
        for place in range(len(batch.calls)):
            await self._room.acquire()
            if self._is_closed:
                batch.fail(closed_early())
            if batch.done.done():  # it failed meanwhile: the others in front of the line may come in
                self._room.release()
                return
            self._calls.append(Call(batch, place))
            self._arrived.set()

    async def take(self, how_many: Callable[[int], int]) -> list[Call]:
        """The first wanted call, and those behind it of the same reward: `how_many(key)` at most."""
        first = None
        while first is None:
            while not self._calls:  # woken, perhaps, for a call that another one took
                await self._arrived.wait()
            first = self._next()
        key = first.batch.key
        taken = [first]
        limit = how_many(key)
        while len(taken) < limit and self._calls and self._calls[0].batch.key == key:
            call = self._next()
            if call is not None:
                taken.append(call)
        return taken

    def _next(self) -> Call | None:
        """Take the first call out of the line; None when its caller went away."""
        call = self._calls.popleft()
        self._room.release()
        if not self._calls:
            self._arrived.clear()
        return call if call.is_wanted else None

    def close(self) -> None:
        """Whoever stands in line, or wants to, gets an error."""
        self._is_closed = True
        for call in self._calls:
            call.batch.fail(closed_early())
            self._room.release()
        self._calls.clear()
        self._arrived.clear()


def closed_early() -> TreadleError:
    return TreadleError("the reward pool was closed before this was scored", fix="close it after the last score")
