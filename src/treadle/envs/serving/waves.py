"""Waves: all prompts of one optimizer step, generated side by side, so that the same seed gives the same curve."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace

from treadle.envs.grouping import build_group, settle
from treadle.envs.hub_client import HubClient
from treadle.envs.rollout import Desk, check_lengths, score_generation
from treadle.envs.scoring import none_scored
from treadle.envs.seeds import stable_seed
from treadle.envs.serving.course import Course, check_divides
from treadle.envs.serving.evaluations import STATUS_POLL_S, evaluate_if_due
from treadle.envs.serving.pause import Pause, next_step
from treadle.envs.serving.report import Ledger
from treadle.envs.serving.wave_count import Wave, WaveCount
from treadle.log import get_logger
from treadle.wire.groups import ScoredGroup
from treadle.wire.hub import EnvStanding

log = get_logger("env")


class Waves:
    """The waves of a run, one after the other, until the trainer has taken its last step."""

    def __init__(
        self, desk: Desk, hub: HubClient, course: Course, ledger: Ledger, keep: Callable[[ScoredGroup], None]
    ) -> None:
        self._desk = desk
        self._hub = hub
        self._course = course
        self._ledger = ledger
        self._keep = keep
        self._last_evaluated_for = 0  # step of the wave

    async def keep_going(self) -> None:
        check_divides(self._course)
        standing = await self._wait_until(lambda _: True)
        await self._follow(standing)
        count = WaveCount.at_start(
            standing, groups_accepted=self._course.groups_accepted, group_size=self._course.group_size
        )
        while True:
            await self._follow(standing)
            if standing.step >= self._course.num_steps:
                break
            count = self._correct(count, standing)
            wave = count.next_wave()
            if wave.step <= min(self._course.num_steps, standing.step + 1 + self._desk.config.max_age):
                await self._evaluate_before(wave)
                await self._deliver(wave)
                count = count.after(wave)
            standing = await self._wait_until_it_is_time(count)
        await evaluate_if_due(self._desk, self._hub, self._course, self._ledger, self._course.num_steps)

    async def _wait_until_it_is_time(self, count: WaveCount) -> EnvStanding:
        """Until the next wave may be sampled, the run is at its end, or things are not as they were counted."""
        course = self._course
        needed = count.step - self._desk.config.max_age if count.step < course.num_steps else course.num_steps
        return await self._wait_until(
            lambda now: now.step >= needed or count.corrected(now) != count or self._is_other(now)
        )

    async def _wait_until(self, is_time: Callable[[EnvStanding], bool]) -> EnvStanding:
        """How things stand at that time. There is a trainer then: a hub that was reset knows of none for a while."""
        with Pause(self._ledger.waits) as pause:
            while True:
                standing = await self._hub.standing(self._course.env_id)
                if standing.batch_size == 0:
                    pause.wait_for(self._hub.trainer)
                elif is_time(standing):
                    return standing
                else:
                    pause.wait_for(next_step(standing.step, self._desk.config.trainer_patience_s))
                await asyncio.sleep(STATUS_POLL_S)

    def _num_steps(self, standing: EnvStanding) -> int:
        total = self._desk.config.total_steps
        return standing.num_steps if total < 0 else min(standing.num_steps, total)

    def _is_other(self, standing: EnvStanding) -> bool:
        wanted = (self._course.batch_size, self._course.num_steps)
        return (standing.batch_size, self._num_steps(standing)) != wanted

    async def _follow(self, standing: EnvStanding) -> None:
        """A trainer that was started again may want other batches, and more steps."""
        if not self._is_other(standing):
            return
        before = self._course
        self._course = replace(
            before,
            num_steps=self._num_steps(standing),
            batch_size=standing.batch_size,
            longest_sequence=(await self._hub.info()).max_token_len,
        )
        log.warning(
            "trainer_changed",
            batch_size=self._course.batch_size,
            batch_size_before=before.batch_size,
            steps=self._course.num_steps,
            steps_before=before.num_steps,
        )
        check_divides(self._course)

    def _correct(self, count: WaveCount, standing: EnvStanding) -> WaveCount:
        corrected = count.corrected(standing)
        if corrected != count:
            log.warning(
                "waves_counted_anew",
                waves_delivered=count.step,
                hub_has_up_to=corrected.step,
                untrained_sequences=standing.untrained_sequences,
                batch_size=standing.batch_size,
            )
        return corrected

    async def _evaluate_before(self, wave: Wave) -> None:
        """At the step whose policy the wave is sampled under: it cannot change before the wave is delivered."""
        step = wave.step - 1 - self._desk.config.max_age
        if wave.step > self._last_evaluated_for and (step > 0 or wave.step == 1):
            self._last_evaluated_for = wave.step
            await evaluate_if_due(self._desk, self._hub, self._course, self._ledger, max(step, 0))

    async def _deliver(self, wave: Wave) -> None:
        started = time.monotonic()
        with self._ledger.flying(f"the wave of step {wave.step}", wave.num_prompts, self._desk.config.worker_timeout):
            groups = await roll_wave(self._desk, wave, self._course, self._ledger)
        for group in groups:
            self._keep(group)
        await self._hub.post_groups(groups, key=f"{self._desk.name}-{self._desk.config.seed}-wave-{wave.name}")
        log.info(
            "wave_delivered",
            wave=wave.step,
            policy_version=min(group.policy_version or 0 for group in groups),
            accuracy=sum((group.metrics or {})["accuracy"] for group in groups) / len(groups),
            seconds=time.monotonic() - started,
        )


async def roll_wave(desk: Desk, wave: Wave, course: Course, ledger: Ledger) -> list[ScoredGroup]:
    """Sample and score a wave. The same seed always asks for the same wave."""
    config = desk.config
    indexes = range(wave.first_item, wave.first_item + wave.num_prompts)
    items = [desk.environment.train_item(index) for index in indexes]
    prompts = [desk.tokenizer.encode_chat(item.messages) for item in items]
    check_lengths(prompts, config.max_token_length, course.longest_sequence)
    generations = await desk.engine.generate_wave(
        f"{desk.name}-train-{wave.name}",
        prompts,
        n=config.group_size,
        max_tokens=config.max_token_length,
        temperature=config.temperature,
        seeds=[stable_seed(config.seed, "train", wave.step, wave.first_place + i) for i in range(wave.num_prompts)],
    )
    scored = await asyncio.gather(
        *(score_generation(desk, *one) for one in zip(items, prompts, generations, strict=True))
    )
    scores = [rollout.score for rollouts in scored for rollout in rollouts]
    if all(score.reward is None for score in scores):
        raise none_scored(len(scores), scores[0], config)
    groups = []
    for index, rollouts in zip(indexes, scored, strict=True):
        settled = settle(desk.environment, rollouts)
        ledger.finish(settled)
        group = build_group(settled, temperature=config.temperature)
        group.item, group.env_id = index, course.env_id
        groups.append(group)
    return groups
