"""Score completions in worker processes that can be killed (RewardPool), or in this process (InlineScorer).

Rewards that ask a server are called in this process by both (services.py).

async with RewardPool(num_workers=2, time_limit_s=10, memory_limit_mb=1024) as pool:
    results = await pool.score(reward, completions_of_one_group)

score() -> CallQueue -> slot 1: worker process     a slot has one worker at a time; it kills a worker that exceeds a
                     -> slot 2: worker process     limit, fails the call that was running, and continues with a new
                     -> ...                        worker
"""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Any, Literal, Self

import msgspec

from treadle.envs.rewards.base import (
    CallResult,
    OwnWorker,
    Reward,
    RewardInput,
    RewardResult,
    call_reward,
    calls_for,
    per_completion,
)
from treadle.envs.rewards.combined import assemble, leaves
from treadle.envs.rewards.services import RewardServices, ServiceReward
from treadle.envs.rewards.worker_handle import IN_WORKER, Worker, WorkerLost, pack_inputs
from treadle.errors import ConfigError, ProcessDied, TreadleError
from treadle.log import get_logger
from treadle.net.workers import WorkerPool

Isolation = Literal["process", "inline"]

CHUNK_S = 0.05  # work sent to a worker at once: much more than a round trip, much less than a time limit
MAX_CHUNK = 64
MAX_STARTS = 3  # failed starts of a worker in a row, before callers get an error
TURN_S = 0.01  # InlineScorer yields to the event loop after this time
log = get_logger("rewards")


@dataclass(eq=False)
class CallBatch:
    """The calls of one reward that one caller waits for."""

    key: int  # of the reward
    config: dict[str, Any]
    calls: Sequence[msgspec.Raw]  # what each call is given
    done: asyncio.Future[None]
    results: dict[int, CallResult] = field(default_factory=dict)  # by index

    def set_result(self, index: int, result: CallResult) -> None:
        self.results[index] = result
        if len(self.results) == len(self.calls) and not self.done.done():
            self.done.set_result(None)

    def fail(self, error: Exception) -> None:
        if not self.done.done():
            self.done.set_exception(error)


@dataclass(frozen=True, eq=False)
class Call:
    batch: CallBatch
    index: int

    @property
    def inputs(self) -> msgspec.Raw:
        return self.batch.calls[self.index]

    @property
    def is_wanted(self) -> bool:
        """Whether its caller still waits."""
        return not self.batch.done.done()

    def set_result(self, result: CallResult) -> None:
        self.batch.set_result(self.index, result)


class CallQueue:
    """Bounded FIFO queue of calls. `put` waits while the queue is full, which slows callers down to the workers."""

    def __init__(self, max_waiting: int) -> None:
        self._calls: deque[Call] = deque()
        self._room = asyncio.Semaphore(max_waiting)
        self._arrived = asyncio.Event()
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._calls)

    async def put(self, batch: CallBatch) -> None:
        for index in range(len(batch.calls)):
            await self._room.acquire()
            if self._is_closed:
                batch.fail(pool_closed_error())
            if batch.done.done():  # it failed meanwhile: leave the room to others
                self._room.release()
                return
            self._calls.append(Call(batch, index))
            self._arrived.set()

    async def take(self, how_many: Callable[[int], int]) -> list[Call]:
        """The first wanted call and the following ones of the same reward, at most `how_many(key)`."""
        first = None
        while first is None:
            while not self._calls:  # another slot may have taken the call
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
        """Remove the first call; None if its caller no longer waits."""
        call = self._calls.popleft()
        self._room.release()
        if not self._calls:
            self._arrived.clear()
        return call if call.is_wanted else None

    def close(self) -> None:
        """Fail all queued calls, and later ones."""
        self._is_closed = True
        for call in self._calls:
            call.batch.fail(pool_closed_error())
            self._room.release()
        self._calls.clear()
        self._arrived.clear()


def pool_closed_error() -> TreadleError:
    return TreadleError("the reward pool was closed before this was scored", fix="close it after the last score")


class RewardPool(WorkerPool[Worker]):
    """`await pool.score(reward, inputs)` from any number of tasks. No call blocks the event loop."""

    def __init__(
        self,
        num_workers: int = 2,
        *,
        time_limit_s: float = 10.0,
        memory_limit_mb: int = 1024,
        max_waiting: int = 4096,
        load_limit_s: float = 120.0,
    ) -> None:
        if num_workers < 1 or time_limit_s <= 0 or memory_limit_mb < 0 or max_waiting < 1:
            raise ConfigError(
                f"no pool of {num_workers} workers, {time_limit_s} s, {memory_limit_mb} MB and {max_waiting} waiting",
                fix="give at least one worker and one place to wait, and limits above 0 (0 MB: no memory limit)",
            )
        super().__init__(num_workers)
        self._time_limit_s = time_limit_s
        self._memory_limit_mb = memory_limit_mb
        self._load_limit_s = load_limit_s
        self._queue = CallQueue(max_waiting)
        self._keys: dict[bytes, int] = {}  # of rewards, by their encoded configuration
        self._mean_s: dict[int, float] = {}  # moving average of the time of a reward's calls
        self.services = RewardServices()
        self._pools: dict[bytes, RewardPool] = {}  # of the rewards with a worker of their own, by their configuration

    async def __aenter__(self) -> Self:
        if IN_WORKER in os.environ:  # every worker would start workers, recursively
            raise ConfigError(
                "a reward worker cannot open a reward pool: the file of the reward does more than define things",
                fix='put what it runs under: if __name__ == "__main__":',
            )
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Kill all workers and wait until they are gone. Callers that still wait get an error."""
        await super().close()
        self._queue.close()
        await asyncio.gather(*(pool.close() for pool in self._pools.values()))
        await self.services.close()

    async def score(self, reward: Reward, inputs: Sequence[RewardInput]) -> list[RewardResult]:
        """A result for each completion, in order. For a reward that looks at groups, pass one group per call."""
        if not self._slots:
            raise TreadleError("the reward pool is not open", fix="use it inside `async with RewardPool(...) as pool:`")
        parts = leaves(reward)
        columns = await asyncio.gather(*(self._score_leaf(part, inputs) for part in parts))
        calls = {
            part.name: per_completion(part, column, len(inputs)) for part, column in zip(parts, columns, strict=True)
        }
        return assemble(reward, calls)

    async def _score_leaf(self, leaf: Reward, inputs: Sequence[RewardInput]) -> list[CallResult]:
        if not inputs:
            return []
        if isinstance(leaf, ServiceReward):
            return await self.services.score(leaf, inputs)
        if leaf.own_worker is not None:
            return await (await self._pool_of(leaf, leaf.own_worker))._score_in_workers(leaf, inputs)
        return await self._score_in_workers(leaf, inputs)

    async def _pool_of(self, leaf: Reward, limits: OwnWorker) -> RewardPool:
        """The pool of one worker for this reward, so that a large model is loaded once."""
        key = msgspec.msgpack.encode(leaf.to_config())
        if key not in self._pools:
            self._pools[key] = RewardPool(
                1, time_limit_s=limits.time_limit_s, load_limit_s=limits.load_limit_s, memory_limit_mb=0
            )
            await self._pools[key].start()
        return self._pools[key]

    async def _score_in_workers(self, leaf: Reward, inputs: Sequence[RewardInput]) -> list[CallResult]:
        config = leaf.to_config()
        try:
            packed = msgspec.msgpack.encode(config)
            calls = [pack_inputs(call) for call in calls_for(leaf, inputs)]
        except TypeError as error:
            raise ConfigError(
                f"the settings of reward '{leaf.name}' or the data row cannot be sent to a worker: {error}",
                fix='use numbers, text, lists and dicts, or score with isolation="inline"',
            ) from None
        key = self._keys.setdefault(packed, len(self._keys))
        batch = CallBatch(key, config, calls, asyncio.get_running_loop().create_future())
        try:
            await self._queue.put(batch)
            await batch.done
        finally:
            batch.done.cancel()  # if the caller was cancelled, skip the rest
        return [batch.results[index] for index in range(len(calls))]

    async def _run_slot(self) -> None:
        """Run calls with one worker at a time, until the pool closes."""
        slot = _Slot()
        try:
            while True:
                calls = await self._queue.take(self._chunk_size)
                try:
                    await self._run_calls(slot, calls)
                except TreadleError as error:
                    _fail(calls, error)
                except asyncio.CancelledError:
                    _fail(calls, pool_closed_error())
                    raise
                except Exception as error:  # a bug here must not leave callers waiting forever
                    log.error("reward_slot_failed", exc_info=True)
                    _fail(calls, ProcessDied(f"scoring failed: {error!r}", fix="see the log; this is a defect"))
                    await self._empty(slot)
        finally:
            await self._empty(slot)

    async def _run_calls(self, slot: _Slot, calls: Sequence[Call]) -> None:
        waiting = deque(calls)
        start = partial(Worker.start, memory_limit_mb=self._memory_limit_mb)
        while waiting:
            slot.worker = slot.worker or await self._start_worker(start, MAX_STARTS)
            try:
                is_well = await self._serve(slot.worker, waiting)
            except ProcessDied:  # while it loaded the reward
                await self._empty(slot)
                raise
            if not is_well:
                await self._empty(slot)

    async def _serve(self, worker: Worker, waiting: deque[Call]) -> bool:
        """Run the calls; False if the worker must be killed before all are done."""
        batch = waiting[0].batch
        await worker.load(batch.key, batch.config, limit_s=self._load_limit_s)
        worker.begin(batch.key, [call.inputs for call in waiting])
        while waiting:
            try:
                result = await worker.result(limit_s=self._time_limit_s)
            except WorkerLost as lost:
                seconds = self._time_limit_s if lost.outcome == "timed_out" else 0.0
                result = CallResult(outcome=lost.outcome, detail=lost.detail, seconds=seconds)
            if result.seconds:
                mean_s = self._mean_s.get(batch.key, result.seconds)
                self._mean_s[batch.key] = 0.9 * mean_s + 0.1 * result.seconds
            if result.outcome == "out_of_memory" and worker.num_calls > 1:
                return False  # perhaps memory that earlier calls left behind: retry in a new worker
            waiting.popleft().set_result(result)
            if result.outcome in ("timed_out", "worker_died", "out_of_memory"):
                return False
        return True

    async def _empty(self, slot: _Slot) -> None:
        if slot.worker is not None:
            await self._stop_worker(slot.worker)
            slot.worker = None

    def _chunk_size(self, key: int) -> int:
        """As many calls as make `CHUNK_S` of work, at most this worker's share of the queue."""
        mean_s = self._mean_s.get(key)
        if mean_s is None:
            return 1
        share = math.ceil(len(self._queue) / self._num_workers)
        return max(1, min(MAX_CHUNK, share, int(CHUNK_S / max(mean_s, 1e-6))))


@dataclass
class _Slot:
    worker: Worker | None = None


def _fail(calls: Sequence[Call], error: Exception) -> None:
    for call in calls:
        call.batch.fail(error)


def make_scorer(isolation: Isolation = "process", **limits: Any) -> Scorer:
    """`make_scorer("process", num_workers=4, time_limit_s=5)`, or `make_scorer("inline")`, which has no limits."""
    return RewardPool(**limits) if isolation == "process" else InlineScorer()


@dataclass
class InlineScorer(AbstractAsyncContextManager["InlineScorer"]):
    """Scores in this process, for rewards that are known to be fast and harmless: there are no limits."""

    _warm: list[Reward] = field(default_factory=list)
    services: RewardServices = field(default_factory=RewardServices)

    async def __aexit__(self, *_: object) -> None:
        await self.services.close()

    async def score(self, reward: Reward, inputs: Sequence[RewardInput]) -> list[RewardResult]:
        turn_ends = time.monotonic() + TURN_S
        calls = {}
        for leaf in leaves(reward):
            if isinstance(leaf, ServiceReward):
                calls[leaf.name] = per_completion(leaf, await self.services.score(leaf, inputs), len(inputs))
                continue
            if leaf not in self._warm:
                leaf.warm_up()
                self._warm.append(leaf)
            column = []
            for call in calls_for(leaf, inputs):
                column.append(call_reward(leaf, call))
                if time.monotonic() > turn_ends:
                    await asyncio.sleep(0)
                    turn_ends = time.monotonic() + TURN_S
            calls[leaf.name] = per_completion(leaf, column, len(inputs))
        return assemble(reward, calls)


Scorer = RewardPool | InlineScorer
