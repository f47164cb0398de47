"""Wave pace: sample all prompts of an optimizer step together, so that the same seed gives the same curve.

Wave w is the batch of optimizer step w: usually all its prompts. A trainer that resumes from an older checkpoint
repeats steps on groups that the hub has kept, and needs no wave for them.

When the trainer changes its batch size, or waits although all waves are delivered (the hub dropped groups), the
schedule is recomputed from what the hub has: the next wave completes the batch that is incomplete there.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Self

from treadle.envs.base import stable_seed
from treadle.envs.hub_client import CurrentWait, HubClient, next_step
from treadle.envs.rollout import EnvContext, apply_group_rules, build_group, check_lengths, score_generation
from treadle.envs.scoring import none_scored
from treadle.envs.serving.assignment import RunAssignment, check_batch_divisible
from treadle.envs.serving.eval_schedule import STATUS_POLL_S, evaluate_if_due
from treadle.envs.serving.monitor import EnvMonitor
from treadle.log import get_logger
from treadle.wire.groups import ScoredGroup
from treadle.wire.hub import EnvState

log = get_logger("env")


@dataclass(frozen=True)
class PlannedWave:
    step: int  # the optimizer step that trains on it
    first_item: int
    num_prompts: int
    first_position: int = 0  # of its prompts in the batch, after those that the hub has already

    @property
    def name(self) -> str:
        """Unique: an item is delivered once, but a step may get several waves."""
        return f"{self.step}-item-{self.first_item}"


@dataclass(frozen=True)
class WaveSchedule:
    """What was delivered: all waves up to `step`, made of the items before `next_item`. Pure."""

    step: int
    next_item: int
    batch_size: int
    group_size: int
    num_started: int = 0  # sequences of the next batch that the hub has already

    @classmethod
    def at_start(cls, standing: EnvState, *, groups_accepted: int, group_size: int) -> Self:
        """The schedule after registration: the next item is the first that the hub does not have.

        The number of delivered waves is an estimate, because earlier batches may have had another size; a wrong one is
        corrected as soon as the trainer waits. For a hub without groups, the trainer's step decides.
        """
        prompts_per_wave = standing.batch_size // group_size
        num_whole, num_started = divmod(standing.untrained_sequences, standing.batch_size)
        step = max(groups_accepted // prompts_per_wave, standing.step + num_whole)
        return cls(step, groups_accepted or step * prompts_per_wave, standing.batch_size, group_size, num_started)

    def corrected(self, standing: EnvState) -> Self:
        """This schedule, or one recomputed from what the hub has, if the batch size changed or groups were lost."""
        has_other_size = standing.batch_size != self.batch_size
        owed = (self.step - standing.step) * self.batch_size
        if not has_other_size and not (standing.trainer_waits and standing.untrained_sequences < owed):
            return self
        num_whole, num_started = divmod(standing.untrained_sequences, standing.batch_size)
        return replace(self, step=standing.step + num_whole, batch_size=standing.batch_size, num_started=num_started)

    def next_wave(self) -> PlannedWave:
        num_prompts = math.ceil((self.batch_size - self.num_started) / self.group_size)
        return PlannedWave(self.step + 1, self.next_item, num_prompts, self.batch_size // self.group_size - num_prompts)

    def after(self, wave: PlannedWave) -> Self:
        return replace(self, step=wave.step, next_item=wave.first_item + wave.num_prompts, num_started=0)


@dataclass
class WaveRunner:
    """Delivers one wave after the other until the trainer has taken its last step."""

    context: EnvContext
    hub: HubClient
    assignment: RunAssignment
    monitor: EnvMonitor
    save_group: Callable[[ScoredGroup], None]

    async def run(self) -> None:
        check_batch_divisible(self.assignment)
        standing = await self._wait_until(lambda _: True)
        await self._follow_trainer(standing)
        schedule = WaveSchedule.at_start(
            standing, groups_accepted=self.assignment.groups_accepted, group_size=self.assignment.group_size
        )
        last_evaluated_for = 0  # the step of a wave
        while True:
            await self._follow_trainer(standing)
            if standing.step >= self.assignment.num_steps:
                break
            schedule = self._correct_schedule(schedule, standing)
            wave = schedule.next_wave()
            if wave.step <= min(self.assignment.num_steps, standing.step + 1 + self.context.config.max_age):
                # Evaluate the policy that the wave is sampled with: it cannot change before the wave is delivered.
                step = wave.step - 1 - self.context.config.max_age
                if wave.step > last_evaluated_for and (step > 0 or wave.step == 1):
                    last_evaluated_for = wave.step
                    await evaluate_if_due(self.context, self.hub, self.assignment, self.monitor, max(step, 0))
                await self._deliver(wave)
                schedule = schedule.after(wave)
            standing = await self._wait_for_next_wave(schedule)
        await evaluate_if_due(self.context, self.hub, self.assignment, self.monitor, self.assignment.num_steps)

    async def _wait_for_next_wave(self, schedule: WaveSchedule) -> EnvState:
        """Wait until the next wave may be sampled, the run ends, or the schedule or the trainer's settings change."""
        num_steps = self.assignment.num_steps
        needed = schedule.step - self.context.config.max_age if schedule.step < num_steps else num_steps
        return await self._wait_until(
            lambda now: now.step >= needed or schedule.corrected(now) != schedule or self._has_changed(now)
        )

    async def _wait_until(self, is_time: Callable[[EnvState], bool]) -> EnvState:
        """Poll the hub until `is_time`; also waits for a trainer, because a hub that was reset knows none at first."""
        with CurrentWait(self.monitor.waits) as current_wait:
            while True:
                standing = await self.hub.standing(self.assignment.env_id)
                if standing.batch_size == 0:
                    current_wait.set(self.hub.trainer_wanted)
                elif is_time(standing):
                    return standing
                else:
                    current_wait.set(next_step(standing.step))
                await asyncio.sleep(STATUS_POLL_S)

    def _num_steps(self, standing: EnvState) -> int:
        total = self.context.config.total_steps
        return standing.num_steps if total < 0 else min(standing.num_steps, total)

    def _has_changed(self, standing: EnvState) -> bool:
        wanted = (self.assignment.batch_size, self.assignment.num_steps)
        return (standing.batch_size, self._num_steps(standing)) != wanted

    async def _follow_trainer(self, standing: EnvState) -> None:
        """Take over the batch size and number of steps of a restarted trainer."""
        if not self._has_changed(standing):
            return
        before = self.assignment
        self.assignment = replace(
            before,
            num_steps=self._num_steps(standing),
            batch_size=standing.batch_size,
            longest_sequence=(await self.hub.info()).max_token_len,
        )
        log.warning(
            "trainer_changed",
            batch_size=self.assignment.batch_size,
            batch_size_before=before.batch_size,
            steps=self.assignment.num_steps,
            steps_before=before.num_steps,
        )
        check_batch_divisible(self.assignment)

    def _correct_schedule(self, schedule: WaveSchedule, standing: EnvState) -> WaveSchedule:
        corrected = schedule.corrected(standing)
        if corrected != schedule:
            log.warning(
                "wave_schedule_corrected",
                waves_delivered=schedule.step,
                hub_has_up_to=corrected.step,
                untrained_sequences=standing.untrained_sequences,
                batch_size=standing.batch_size,
            )
        return corrected

    async def _deliver(self, wave: PlannedWave) -> None:
        started = time.monotonic()
        with self.monitor.track_groups(
            f"the wave of step {wave.step}", wave.num_prompts, self.context.config.worker_timeout
        ):
            groups = await roll_wave(self.context, wave, self.assignment, self.monitor)
        for group in groups:
            self.save_group(group)
        await self.hub.post_groups(groups, key=f"{self.context.name}-{self.context.config.seed}-wave-{wave.name}")
        log.info(
            "wave_delivered",
            wave=wave.step,
            policy_version=min(group.policy_version or 0 for group in groups),
            accuracy=sum((group.metrics or {})["accuracy"] for group in groups) / len(groups),
            seconds=time.monotonic() - started,
        )


async def roll_wave(
    context: EnvContext, wave: PlannedWave, assignment: RunAssignment, monitor: EnvMonitor
) -> list[ScoredGroup]:
    """Sample and score a wave; the same seed gives the same wave."""
    config = context.config
    indexes = range(wave.first_item, wave.first_item + wave.num_prompts)
    items = [context.environment.train_item(index) for index in indexes]
    prompts = [context.tokenizer.encode_chat(item.messages) for item in items]
    check_lengths(prompts, config.max_token_length, assignment.longest_sequence)
    generations = await context.engine.generate_wave(
        f"{context.name}-train-{wave.name}",
        prompts,
        n=config.group_size,
        max_tokens=config.max_token_length,
        temperature=config.temperature,
        seeds=[stable_seed(config.seed, "train", wave.step, wave.first_position + i) for i in range(wave.num_prompts)],
    )
    scored = await asyncio.gather(
        *(score_generation(context, *one) for one in zip(items, prompts, generations, strict=True))
    )
    scores = [rollout.score for rollouts in scored for rollout in rollouts]
    if all(score.reward is None for score in scores):
        raise none_scored(len(scores), scores[0], config)
    groups = []
    for index, item, rollouts in zip(indexes, items, scored, strict=True):
        settled = apply_group_rules(context.environment, rollouts)
        monitor.finish(settled)
        group = build_group(
            settled, temperature=config.temperature, source=item.source, sources=context.environment.sources
        )
        group.item, group.env_id = index, assignment.env_id
        groups.append(group)
    return groups
