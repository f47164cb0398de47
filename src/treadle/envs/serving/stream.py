"""Groups one by one, as many at once as keep the engine busy and the data fresh.

    every POLL_S: how things stand at the hub (pace.room)  -->  begin so many items
    an item:      roll its group --> worth sending? --> on disk (delivery) --> done (cursor)

Nothing that runs is thrown away when there is enough: fewer are begun. An item that fails is asked again later; one
that always fails is left out with a count, and when nothing succeeds any more the process ends and says why.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from treadle.envs.base import Item
from treadle.envs.chat import Sampling
from treadle.envs.grouping import build_group, settle, why_useless
from treadle.envs.hub_client import HubClient
from treadle.envs.rollout import Desk, Rollout, roll_group
from treadle.envs.seeds import stable_seed
from treadle.envs.serving.course import Course, check_fills_batches
from treadle.envs.serving.cursor import Cursor
from treadle.envs.serving.delivery import Delivery
from treadle.envs.serving.pace import FlightLimit, room
from treadle.envs.serving.pause import Pause, next_step
from treadle.envs.serving.report import TOO_FEW_TO_JUDGE, Ledger, judge
from treadle.envs.serving.selection import Selection
from treadle.errors import ConfigError, EngineError, ProcessDied, TreadleError, UserError
from treadle.log import get_logger
from treadle.watch.waits import Wanted
from treadle.wire.groups import ScoredGroup
from treadle.wire.hub import EnvStanding

log = get_logger("env")

POLL_S = 0.1
ENGINE_LOOK_S = 1.0
MAX_TRIES = 3  # of one item
MAX_FAILURES = 12  # in a row, of any items
EARLY_BATCHES = 3  # when all groups of so many are dropped at the beginning, that is said


def key_of(name: str, seed: int, index: int) -> str:
    """What the hub knows the delivery of an item by: `key_of("gsm8k", 0, 126) == "gsm8k-0-item-126"`."""
    return f"{name}-{seed}-item-{index}"


def item_of(key: str) -> int:
    return int(key.rpartition("-")[2])


@dataclass
class Stream:
    """The items in flight, and what became of the others."""

    desk: Desk
    course: Course
    cursor: Cursor
    selection: Selection
    delivery: Delivery
    limit: FlightLimit
    keep: Callable[[ScoredGroup], None]
    ledger: Ledger
    in_flight: dict[int, asyncio.Task[None]] = field(default_factory=dict)  # by item
    dropped: Counter[str] = field(default_factory=Counter)  # groups, by reason; since the last group that was sent
    _tries: Counter[int] = field(default_factory=Counter)
    _failures_in_a_row: int = 0
    _unscored_in_a_row: int = 0
    _group_sequences: float = 0.0  # of a group, on average; the late ones count more

    def __post_init__(self) -> None:
        self._group_sequences = float(self.desk.config.group_size)

    async def keep_going(self, hub: HubClient, num_steps: int | None) -> None:
        """Until the trainer has taken its last step. Leaves nothing running behind it."""
        watch = asyncio.create_task(self._watch_engine())
        try:
            with Pause(self.ledger.waits) as pause:
                while not await self._look(hub, num_steps, pause):
                    await self.cursor.save()
                    await self._wait_for_a_change()
        finally:
            for task in (watch, *self.in_flight.values()):
                task.cancel()
            await asyncio.gather(watch, *self.in_flight.values(), return_exceptions=True)
            await self.cursor.save()

    async def _look(self, hub: HubClient, num_steps: int | None, pause: Pause) -> bool:
        """How things stand at the hub: begin what there is room for; whether the last step is taken."""
        # Counted before the look: what is delivered meanwhile counts twice for a moment, and is never left out.
        num_spooled, num_in_flight = self.delivery.num_waiting, len(self.in_flight)
        self.ledger.num_undelivered = num_spooled
        standing = await hub.standing(self.course.env_id)
        if num_steps is not None:
            standing.num_steps = min(standing.num_steps, num_steps)
        if standing.batch_size and standing.step >= standing.num_steps:
            return True
        self._follow(standing)
        self._begin(
            room(
                standing,
                max_age=self.desk.config.max_age,
                group_sequences=self._group_sequences,
                num_spooled=num_spooled,
                num_in_flight=num_in_flight,
                limit=self.limit.value,
            )
        )
        pause.wait_for(self._why_idle(standing, hub))
        return False

    def _follow(self, standing: EnvStanding) -> None:
        """A trainer that was started again may want batches of another size."""
        if standing.batch_size in (0, self.course.batch_size):
            return
        before, self.course = self.course, replace(self.course, batch_size=standing.batch_size)
        log.warning("trainer_changed", batch_size=standing.batch_size, batch_size_before=before.batch_size)
        if not self.desk.environment.has_turns:
            check_fills_batches(self.course)

    def _begin(self, count: int) -> None:
        for _ in range(count):
            index = self.cursor.take()
            self.in_flight[index] = asyncio.create_task(self._bring(index))

    def _why_idle(self, standing: EnvStanding, hub: HubClient) -> Wanted | None:
        """What has to happen before anything is begun; None while something runs."""
        if self.in_flight:
            return None
        return next_step(standing.step, self.desk.config.trainer_patience_s) if standing.batch_size else hub.trainer

    async def _wait_for_a_change(self) -> None:
        """An item that ends, a hub that refuses, or a while."""
        await asyncio.wait(
            [self.delivery.failed, *self.in_flight.values()], timeout=POLL_S, return_when=asyncio.FIRST_COMPLETED
        )
        if self.delivery.failed.done():
            await self.delivery.failed
        for index, task in list(self.in_flight.items()):
            if task.done():
                del self.in_flight[index]
                task.result()  # a mistake of ours ends the process

    async def _bring(self, index: int) -> None:
        """One item, from its prompt to a group that is safe on disk."""
        try:
            async with asyncio.timeout(self.desk.config.worker_timeout):
                with self.ledger.flying(f"item {index}", 1, self.desk.config.worker_timeout / 2):
                    await self._roll_and_send(index)
        except TimeoutError:
            self._ask_again(index, EngineError(f"a group took longer than {self.desk.config.worker_timeout:.0f} s"))
        except (EngineError, UserError) as error:
            self._ask_again(index, error)
        else:
            self._failures_in_a_row = 0

    async def _roll_and_send(self, index: int) -> None:
        config = self.desk.config
        sampling = Sampling(
            max_tokens=config.max_token_length,
            temperature=config.temperature,
            seed=stable_seed(config.seed, "item", index, self._tries[index]),
            longest_sequence=self.course.longest_sequence,
        )
        place = self.selection.place_of(index)
        started = time.monotonic()
        rollouts = await roll_group(self.desk, self._item(place), sampling, num_rollouts=config.group_size)
        self.desk.judge.require_scores([rollout.score for rollout in rollouts])
        self.selection.learn(place, rollouts)
        rollouts = settle(self.desk.environment, rollouts)
        reason = why_useless(rollouts, drop_equal_scores=config.ensure_scores_are_not_same)
        if reason is not None:
            log.info("group_dropped", item=place, reason=reason)
            self._drop(rollouts, reason)
            self._count_unscored(rollouts, reason)
        else:
            await self._send(index, place, rollouts, time.monotonic() - started)
        self.cursor.finish(index)

    def _item(self, place: int) -> Item:
        try:
            return self.desk.environment.train_item(place)
        except TreadleError:
            raise
        except Exception as error:  # the border to code that a user writes
            log.error("item_failed", exc_info=True, item=place)
            raise ConfigError(f"train_item({place}) raised {type(error).__name__}: {error}") from error

    def _count_unscored(self, rollouts: list[Rollout], reason: str) -> None:
        self._unscored_in_a_row = 0 if reason == "equal_scores" else self._unscored_in_a_row + 1
        if self._unscored_in_a_row >= MAX_FAILURES:
            errors = Counter(rollout.score.error or reason for rollout in rollouts).most_common(1)
            raise ProcessDied(
                f"of {MAX_FAILURES} groups in a row, none was fit to be trained on: {errors[0][0]}",
                fix=f"treadle env {self.desk.config.name} validate",
            )

    async def _send(self, index: int, place: int, rollouts: list[Rollout], seconds: float) -> None:
        config = self.desk.config
        self._unscored_in_a_row = 0
        group = build_group(rollouts, temperature=config.temperature)
        group.item, group.env_id = place, self.course.env_id
        if len(group.tokens) > self.course.batch_size:
            log.warning("group_dropped", item=place, reason="oversize", sequences=len(group.tokens))
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
        self.keep(group)
        await self.delivery.accept(key_of(self.desk.name, config.seed, index), group)
        self.ledger.finish(rollouts)

    def _drop(self, rollouts: Sequence[Rollout], reason: str) -> None:
        """When nothing but dropped groups comes at the beginning, no step is ever taken: that is said at once."""
        self.dropped[reason] += 1
        self.ledger.finish(rollouts, dropped_for=reason)
        groups = self.ledger.total
        num_early = EARLY_BATCHES * math.ceil(self.course.batch_size / self.desk.config.group_size)
        if groups.sent == 0 and groups.finished == max(num_early, TOO_FEW_TO_JUDGE):
            problem, fix = judge(groups, self.desk.config.name)
            log.warning("no_group_was_sent_yet", problem=problem, fix=fix)

    def _ask_again(self, index: int, error: TreadleError) -> None:
        self._tries[index] += 1
        self._failures_in_a_row += 1
        # What was in flight when an engine went away fails all at once: that is one failure, not many.
        if self._failures_in_a_row >= max(MAX_FAILURES, 3 * self.limit.value):
            raise error
        if self._tries[index] < MAX_TRIES:
            log.warning("group_failed", item=index, again=True, problem=str(error))
            self.ledger.ask_again()
            self.cursor.give_back(index)
        else:
            log.error("item_left_out", item=index, tries=self._tries[index], problem=str(error))
            self._drop((), "failed")
            self.cursor.finish(index)

    async def _watch_engine(self) -> None:
        """How much the engine has to do, now and then; one that is away is noticed by those who ask it."""
        while True:
            await asyncio.sleep(ENGINE_LOOK_S)
            try:
                health = await self.desk.engine.health()
            except EngineError as error:
                log.warning("engine_not_seen", problem=str(error))
                continue
            self.limit.learn(
                num_running=health.num_running, num_waiting=health.num_waiting, num_in_flight=len(self.in_flight)
            )
