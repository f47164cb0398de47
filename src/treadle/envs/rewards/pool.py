"""Rewards in worker processes that can be killed.

async with RewardPool(num_workers=2, time_limit_s=10, memory_limit_mb=1024) as pool:
    results = await pool.score(reward, completions_of_one_group)

score() -> CallLine -> place 1: worker process     a place keeps one worker at a time; it kills one that takes too
                    -> place 2: worker process     long or too much, blames the call it was at, and goes on with
                    -> ...                         the rest of its calls on the next
"""

from __future__ import annotations

import asyncio
import math
import os
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import msgspec

from treadle.envs.rewards.base import Reward, RewardInput
from treadle.envs.rewards.calls import calls_for, per_completion
from treadle.envs.rewards.combined import assemble, leaves
from treadle.envs.rewards.line import Batch, Call, CallLine, closed_early
from treadle.envs.rewards.messages import IN_WORKER, pack_inputs
from treadle.envs.rewards.outcome import CallResult, RewardResult
from treadle.envs.rewards.worker_handle import Worker, WorkerLost
from treadle.errors import ConfigError, ProcessDied, TreadleError
from treadle.log import get_logger

CHUNK_S = 0.05  # work handed to a worker at once: much more than the way there and back, much less than a limit
MAX_CHUNK = 64
MAX_STARTS = 3  # in a row without a worker, before callers are told
PAUSE_S = 0.5  # between them
log = get_logger("rewards")


class RewardPool:
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
        self._num_workers = num_workers
        self._time_limit_s = time_limit_s
        self._memory_limit_mb = memory_limit_mb
        self._load_limit_s = load_limit_s
        self._line = CallLine(max_waiting)
        self._places: list[asyncio.Task[None]] = []
        self._keys: dict[bytes, int] = {}  # of rewards, by what they are made from
        self._mean_s: dict[int, float] = {}  # of a reward's calls, the late ones counting more
        self.workers: set[Worker] = set()

    async def __aenter__(self) -> Self:
        if IN_WORKER in os.environ:  # or every worker would start workers, without end
            raise ConfigError(
                "a reward worker cannot open a reward pool: the file of the reward does more than define things",
                fix='put what it runs under: if __name__ == "__main__":',
            )
        self._places = [asyncio.create_task(self._keep_place()) for _ in range(self._num_workers)]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Kill all workers and wait until they are gone. Who still waits for a score gets an error."""
        for place in self._places:
            place.cancel()
        await asyncio.gather(*self._places, return_exceptions=True)
        self._places = []
        self._line.close()

    async def score(self, reward: Reward, inputs: Sequence[RewardInput]) -> list[RewardResult]:
        """A result for each completion, in order. Give the completions of one group when the reward looks at groups."""
        if not self._places:
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
        batch = Batch(key, config, calls, asyncio.get_running_loop().create_future())
        try:
            await self._line.put(batch)
            await batch.done
        finally:
            batch.done.cancel()  # of a caller that went away: nobody need score the rest
        return [batch.results[place] for place in range(len(calls))]

    async def _keep_place(self) -> None:
        """One worker at a time, until the pool closes."""
        place = _Place()
        try:
            while True:
                calls = await self._line.take(self._chunk_size)
                try:
                    await self._work_off(place, calls)
                except TreadleError as error:
                    _fail(calls, error)
                except asyncio.CancelledError:
                    _fail(calls, closed_early())
                    raise
                except Exception as error:  # a mistake in here must not leave callers waiting for ever
                    log.error("reward_place_failed", exc_info=True)
                    _fail(calls, ProcessDied(f"scoring failed: {error!r}", fix="see the log; this is a defect"))
                    await self._dismiss(place)
        finally:
            await self._dismiss(place)

    async def _work_off(self, place: _Place, calls: Sequence[Call]) -> None:
        waiting = deque(calls)
        while waiting:
            place.worker = place.worker or await self._start_worker()
            try:
                is_well = await self._serve(place.worker, waiting)
            except ProcessDied:  # while it loaded the reward
                await self._dismiss(place)
                raise
            if not is_well:
                await self._dismiss(place)

    async def _serve(self, worker: Worker, waiting: deque[Call]) -> bool:
        """Work off the calls; False when the worker has to go before all are done."""
        batch = waiting[0].batch
        await worker.load(batch.key, batch.config, limit_s=self._load_limit_s)
        await worker.begin(batch.key, [call.inputs for call in waiting])
        while waiting:
            try:
                result = await worker.result(limit_s=self._time_limit_s)
            except WorkerLost as lost:
                seconds = self._time_limit_s if lost.outcome == "timed_out" else 0.0
                result = CallResult(outcome=lost.outcome, detail=lost.detail, seconds=seconds)
            if result.seconds:
                self._note_duration(batch.key, result.seconds)
            if result.outcome == "out_of_memory" and worker.num_calls > 1:
                return False  # perhaps what earlier calls left behind: once more, in a fresh worker
            waiting.popleft().apply_group_rules(result)
            if result.outcome in ("timed_out", "worker_died", "out_of_memory"):
                return False
        return True

    async def _start_worker(self) -> Worker:
        for attempt in range(1, MAX_STARTS + 1):
            try:
                worker = await Worker.start(memory_limit_mb=self._memory_limit_mb)
            except (OSError, WorkerLost) as error:
                log.warning("reward_worker_cannot_start", problem=str(error), attempt=attempt)
                await asyncio.sleep(PAUSE_S)
                continue
            self.workers.add(worker)
            return worker
        raise ProcessDied("no worker for rewards could be started", fix="see the log: is memory short?")

    async def _dismiss(self, place: _Place) -> None:
        if place.worker is not None:
            await place.worker.kill()
            self.workers.discard(place.worker)
            place.worker = None

    def _chunk_size(self, key: int) -> int:
        """As many calls as make `CHUNK_S` of work, but no more than this worker's share of what waits."""
        mean_s = self._mean_s.get(key)
        if mean_s is None:
            return 1
        share = math.ceil(len(self._line) / self._num_workers)
        return max(1, min(MAX_CHUNK, share, int(CHUNK_S / max(mean_s, 1e-6))))

    def _note_duration(self, key: int, seconds: float) -> None:
        self._mean_s[key] = 0.9 * self._mean_s.get(key, seconds) + 0.1 * seconds


@dataclass
class _Place:
    worker: Worker | None = None


def _fail(calls: Sequence[Call], error: Exception) -> None:
    for call in calls:
        call.batch.fail(error)
