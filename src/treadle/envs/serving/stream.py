"""Stream pace: sample groups one by one, enough at once to keep the engine busy and few enough to keep the data fresh.

    every poll_interval: read the standing at the hub, start as many items as assignment.room allows
    an item:      sample its group --> worth sending? --> write it to the spool --> mark it finished

Groups in flight are never cancelled when there is enough data; fewer are started instead. An item that fails is
retried later; one that always fails is dropped and counted. When nothing succeeds any more, the process ends with an
error.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from treadle.envs.base import Item, stable_seed
from treadle.envs.chat import RolloutSampling
from treadle.envs.hub_client import CurrentWait, HubClient, next_step
from treadle.envs.rollout import EnvContext, Rollout, apply_group_rules, build_group, drop_reason, roll_group
from treadle.envs.serving.assignment import InFlightLimit, RunAssignment, check_can_fill_batches, describe_pace, room
from treadle.envs.serving.monitor import TOO_FEW_TO_JUDGE, EnvMonitor, diagnose
from treadle.envs.serving.stream_state import Delivery, DifficultySelection, ItemCursor
from treadle.errors import ConfigError, EngineError, ProcessDied, TreadleError, UserError
from treadle.log import get_logger
from treadle.wire.groups import ScoredGroup
from treadle.wire.hub import EnvState

log = get_logger("env")

POLL_S = 0.1
POLLS_PER_S = 500.0  # of all environments together: a hub answers more
LONGEST_POLL_S = 3.0  # a hub takes an environment that is silent for 10 s to be gone
ENGINE_LOOK_S = 1.0
ENGINE_LOOKS_PER_S = 100.0  # at each engine, of all environments together
PACE_LOG_S = 10.0  # shortest time between two log lines about the pace
MAX_TRIES = 3  # of one item
MAX_FAILURES = 12  # in a row, of any items
EARLY_BATCHES = 3  # warn when all groups of the first batches were dropped


def delivery_key(name: str, seed: int, index: int) -> str:
    """Idempotency key of an item's delivery: `delivery_key("gsm8k", 0, 126) == "gsm8k-0-item-126"`."""
    return f"{name}-{seed}-item-{index}"


def item_of_key(key: str) -> int:
    return int(key.rpartition("-")[2])


def poll_interval(standing: EnvState) -> float:
    """Seconds between two looks at the hub, so that a thousand environments do not keep it busy with questions.

    >>> counts = dict(step=4, num_steps=9, batch_size=64, untrained_sequences=0, trainer_waits=False, share=1.0)
    >>> [poll_interval(EnvState(**counts, num_present=number)) for number in (1, 50, 1000)]
    [0.1, 0.1, 2.0]
    """
    return min(LONGEST_POLL_S, max(POLL_S, standing.num_present / POLLS_PER_S))


def engine_look_interval(num_present: int) -> float:
    """Seconds between two looks at the engines' load by one of `num_present` environments.

    >>> [engine_look_interval(number) for number in (1, 100, 1000)]
    [1.0, 1.0, 10.0]
    """
    return max(ENGINE_LOOK_S, num_present / ENGINE_LOOKS_PER_S)


@dataclass
class StreamRunner:
    """Samples and delivers items until the trainer has taken its last step."""

    context: EnvContext
    assignment: RunAssignment
    cursor: ItemCursor
    selection: DifficultySelection | None  # None: the items in order
    delivery: Delivery
    limit: InFlightLimit
    save_group: Callable[[ScoredGroup], None]
    monitor: EnvMonitor
    in_flight: dict[int, asyncio.Task[None]] = field(default_factory=dict)  # by item
    dropped: Counter[str] = field(default_factory=Counter)  # groups, by reason; since the last group that was sent
    _tries: Counter[int] = field(default_factory=Counter)
    _failures_in_a_row: int = 0
    _unscored_in_a_row: int = 0
    _logged_limit: str = ""
    _pace_logged_at: float = -math.inf
    _group_sequences: float = 0.0  # sequences of a group, as an exponential moving average
    _poll_s: float = POLL_S
    _look_s: float = ENGINE_LOOK_S

    def __post_init__(self) -> None:
        self._group_sequences = float(self.context.config.group_size)

    async def run(self, hub: HubClient, num_steps: int | None) -> None:
        """Run until the trainer has taken its last step, then cancel everything that is in flight."""
        watch = asyncio.create_task(self._watch_engine())
        try:
            with CurrentWait(self.monitor.waits) as current_wait:
                while not await self._poll_hub(hub, num_steps, current_wait):
                    await self.cursor.save()
                    await self._wait_for_a_change()
        finally:
            for task in (watch, *self.in_flight.values()):
                task.cancel()
            await asyncio.gather(watch, *self.in_flight.values(), return_exceptions=True)
            await self.cursor.save()

    async def _poll_hub(self, hub: HubClient, num_steps: int | None, current_wait: CurrentWait) -> bool:
        """Start as many items as there is room for; returns whether the last step is taken."""
        # Counted before the request: a group delivered meanwhile counts twice for a moment, and is never missed.
        num_spooled, num_in_flight = self.delivery.num_waiting, len(self.in_flight)
        self.monitor.num_undelivered = num_spooled
        standing = await hub.standing(self.assignment.env_id)
        if num_steps is not None:
            standing.num_steps = min(standing.num_steps, num_steps)
        if standing.batch_size and standing.step >= standing.num_steps:
            return True
        self._follow_trainer(standing)
        self._poll_s, self._look_s = poll_interval(standing), engine_look_interval(standing.num_present)
        available = room(
            standing,
            max_age=self.context.config.max_age,
            group_sequences=self._group_sequences,
            num_spooled=num_spooled,
            num_in_flight=num_in_flight,
            limit=self.limit,
            kept_share=self.monitor.kept_share,
        )
        for _ in range(available.num_groups):
            index = self.cursor.take()
            self.in_flight[index] = asyncio.create_task(self._process_item(index))
        self._report_pace(available.limited_by)
        if self.in_flight:
            current_wait.set(None)
        elif not standing.batch_size:
            current_wait.set(hub.trainer_wanted)
        else:
            current_wait.set(next_step(standing.step))
        return False

    def _follow_trainer(self, standing: EnvState) -> None:
        """Take over the batch size of a restarted trainer."""
        if standing.batch_size in (0, self.assignment.batch_size):
            return
        before, self.assignment = self.assignment, replace(self.assignment, batch_size=standing.batch_size)
        log.warning("trainer_changed", batch_size=standing.batch_size, batch_size_before=before.batch_size)
        if not self.context.environment.has_turns:
            check_can_fill_batches(self.assignment)

    def _report_pace(self, limited_by: str) -> None:
        """Update the report; log when the limiting factor has changed, at most every PACE_LOG_S."""
        self.monitor.pace = describe_pace(self.limit, len(self.in_flight), limited_by)
        if limited_by != self._logged_limit and time.monotonic() >= self._pace_logged_at + PACE_LOG_S:
            self._logged_limit, self._pace_logged_at = limited_by, time.monotonic()
            log.info("pace", state=self.monitor.pace)

    async def _wait_for_a_change(self) -> None:
        """Wait until an item ends, the delivery fails, or it is time to look at the hub."""
        await asyncio.wait(
            [self.delivery.failed, *self.in_flight.values()], timeout=self._poll_s, return_when=asyncio.FIRST_COMPLETED
        )
        if self.delivery.failed.done():
            await self.delivery.failed
        for index, task in list(self.in_flight.items()):
            if task.done():
                del self.in_flight[index]
                task.result()  # an unexpected exception ends the process

    async def _process_item(self, index: int) -> None:
        """Sample one item and write its group to the spool."""
        try:
            async with asyncio.timeout(self.context.config.worker_timeout):
                with self.monitor.track_groups(f"item {index}", 1, self.context.config.worker_timeout / 2):
                    await self._roll_and_send(index)
        except TimeoutError:
            self._retry_later(
                index, EngineError(f"a group took longer than {self.context.config.worker_timeout:.0f} s")
            )
        except (EngineError, UserError) as error:
            self._retry_later(index, error)
        else:
            self._failures_in_a_row = 0

    async def _roll_and_send(self, index: int) -> None:
        config = self.context.config
        sampling = RolloutSampling(
            max_tokens=config.max_token_length,
            temperature=config.temperature,
            seed=stable_seed(config.seed, "item", index, self._tries[index]),
            longest_sequence=self.assignment.longest_sequence,
        )
        item_index = index if self.selection is None else self.selection.item_index(index)
        started = time.monotonic()
        item = self._item(item_index)
        rollouts = await roll_group(self.context, item, sampling, num_rollouts=config.group_size)
        self.context.judge.require_scores([rollout.score for rollout in rollouts])
        if self.selection is not None:
            self.selection.learn(item_index, rollouts)
        rollouts = apply_group_rules(self.context.environment, rollouts)
        reason = drop_reason(rollouts, drop_equal_scores=config.ensure_scores_are_not_same)
        if reason is not None:
            log.info("group_dropped", item=item_index, reason=reason)
            self._drop(rollouts, reason)
            self._unscored_in_a_row = 0 if reason == "equal_scores" else self._unscored_in_a_row + 1
            if self._unscored_in_a_row >= MAX_FAILURES:
                errors = Counter(rollout.score.error or reason for rollout in rollouts).most_common(1)
                raise ProcessDied(
                    f"of {MAX_FAILURES} groups in a row, none was fit to be trained on: {errors[0][0]}",
                    fix=f"treadle env {config.name} validate",
                )
        else:
            sources = self.context.environment.sources
            group = build_group(rollouts, temperature=config.temperature, source=item.source, sources=sources)
            group.item, group.env_id = item_index, self.assignment.env_id
            await self._send(index, group, rollouts, time.monotonic() - started)
        self.cursor.finish(index)

    def _item(self, item_index: int) -> Item:
        try:
            return self.context.environment.train_item(item_index)
        except TreadleError:
            raise
        except Exception as error:  # user code
            log.error("item_failed", exc_info=True, item=item_index)
            raise ConfigError(f"train_item({item_index}) raised {type(error).__name__}: {error}") from error

    async def _send(self, index: int, group: ScoredGroup, rollouts: list[Rollout], seconds: float) -> None:
        self._unscored_in_a_row = 0
        if len(group.tokens) > self.assignment.batch_size:
            log.warning("group_dropped", item=group.item, reason="oversize", sequences=len(group.tokens))
            self._drop(rollouts, "oversize")
            return
        self._group_sequences += 0.1 * (len(group.tokens) - self._group_sequences)
        dropped, self.dropped = self.dropped, Counter()
        group.metrics = {
            **(group.metrics or {}),
            "group_s": seconds,
            "in_flight": float(len(self.in_flight)),
            **{f"dropped_{reason}": float(count) for reason, count in dropped.items()},
        }
        self.save_group(group)
        key = delivery_key(self.context.name, self.context.config.seed, index)
        await self.delivery.accept(key, group)
        self.monitor.finish(rollouts)

    def _drop(self, rollouts: Sequence[Rollout], reason: str) -> None:
        """Count a dropped group; warn if all groups of the first batches were dropped: no step would ever be taken."""
        self.dropped[reason] += 1
        self.monitor.finish(rollouts, dropped_for=reason)
        groups = self.monitor.total
        num_early = EARLY_BATCHES * math.ceil(self.assignment.batch_size / self.context.config.group_size)
        if groups.sent == 0 and groups.finished == max(num_early, TOO_FEW_TO_JUDGE):
            problem, fix = diagnose(groups, self.context.config.name)
            log.warning("no_group_was_sent_yet", problem=problem, fix=fix)

    def _retry_later(self, index: int, error: TreadleError) -> None:
        self._tries[index] += 1
        self._failures_in_a_row += 1
        # When an engine goes away, everything in flight fails at once: that is one failure, not many.
        if self._failures_in_a_row >= max(MAX_FAILURES, 3 * self.limit.value):
            raise error
        if self._tries[index] < MAX_TRIES:
            log.warning("group_failed", item=index, again=True, problem=str(error))
            self.monitor.num_retries += 1
            self.cursor.give_back(index)
        else:
            log.error("item_left_out", item=index, tries=self._tries[index], problem=str(error))
            self._drop((), "failed")
            self.cursor.finish(index)

    async def _watch_engine(self) -> None:
        """Adapt the limit to the engine. Requests that fail, not this loop, detect an engine that is away."""
        while True:
            try:
                health = await self.context.engine.health()
            except EngineError as error:
                log.warning("engine_not_seen", problem=str(error))
            else:
                self.limit.update(health, group_size=self.context.config.group_size, num_in_flight=len(self.in_flight))
            await asyncio.sleep(self._look_s)
