"""The loop of an environment process.

    register --> for each wave w = next..num_steps:
                   wait until step w-1-max_age is taken: the wave is sampled under that version
                   evaluation due at that step?  evaluate; the version cannot change before the wave is delivered
                   sample and score the wave  -->  deliver it as one list under one key
                 --> wait until step num_steps is taken, evaluate, leave

Wave w is what optimizer step w trains on. The hub counts the groups that it accepted, so a restarted
environment goes on with the first wave that the hub does not have; nothing here would have to be saved.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from treadle.config.schema import EnvConfig
from treadle.envs.evaluation import evaluate_policy, result_path, save_result
from treadle.envs.hub_client import HubClient
from treadle.envs.rollout import Desk, roll_wave
from treadle.errors import ConfigError, HubError, TreadleError
from treadle.log import get_logger
from treadle.wire.hub import BatchInfo, RegisteredEnv, RegisterEnv

log = get_logger("env")

_STATUS_POLL_S = 0.05
_GOODBYE_S = 1.0


@dataclass(frozen=True)
class Course:
    """Which waves this process is to deliver, and how."""

    env_id: int
    next_wave: int
    num_waves: int
    prompts_per_wave: int
    longest_sequence: int


def plan_course(config: EnvConfig, registered: RegisteredEnv, info: BatchInfo) -> Course:
    """What the hub said -> the waves to deliver. Pure."""
    if registered.env_id is None or registered.num_steps is None or info.batch_size < 1:
        raise HubError(
            "the hub registered this environment but knows of no trainer",
            fix="start the trainer, then this again",
        )
    if info.batch_size % config.group_size:
        raise ConfigError(
            f"the batch of {info.batch_size} sequences is no multiple of group_size {config.group_size}",
            fix="choose --env.group-size so that it divides the trainer's batch size",
        )
    prompts_per_wave = info.batch_size // config.group_size
    return Course(
        env_id=registered.env_id,
        next_wave=registered.groups_accepted // prompts_per_wave + 1,
        num_waves=registered.num_steps,
        prompts_per_wave=prompts_per_wave,
        longest_sequence=info.max_token_len,
    )


def evaluation_is_due(config: EnvConfig, step: int, num_steps: int) -> bool:
    """Before the first step, after the last, and every `steps_per_eval` steps between."""
    if config.num_eval == 0:
        return False
    return step in (0, num_steps) or (config.steps_per_eval > 0 and step % config.steps_per_eval == 0)


async def run(desk: Desk, hub: HubClient) -> None:
    """Deliver every wave and evaluate when due; returns after the last evaluation."""
    config = desk.config
    registered = await hub.register_env(
        RegisterEnv(
            max_token_length=config.max_token_length,
            desired_name=desk.name,
            weight=config.inference_weight,
            group_size=config.group_size,
        )
    )
    course = plan_course(config, registered, await hub.info())
    log.info("registered", name=desk.name, env_id=course.env_id, next_wave=course.next_wave, waves=course.num_waves)
    try:
        for wave in range(course.next_wave, course.num_waves + 1):
            step = wave - 1 - config.max_age
            await _wait_for_step(hub, step)
            if step > 0 or wave == 1:
                await _evaluate_if_due(desk, hub, max(step, 0), course.num_waves)
            await _deliver_wave(desk, hub, course, wave)
        await _evaluate_if_due(desk, hub, course.num_waves, course.num_waves)
    finally:
        await _say_goodbye(hub, course.env_id)


async def _deliver_wave(desk: Desk, hub: HubClient, course: Course, wave: int) -> None:
    started = time.monotonic()
    groups = await roll_wave(
        desk,
        wave,
        prompts_per_wave=course.prompts_per_wave,
        env_id=course.env_id,
        longest_sequence=course.longest_sequence,
    )
    await hub.post_groups(groups, key=f"{desk.name}-{desk.config.seed}-wave-{wave}")
    log.info(
        "wave_delivered",
        wave=wave,
        policy_version=min(group.policy_version or 0 for group in groups),
        accuracy=sum((group.metrics or {})["accuracy"] for group in groups) / len(groups),
        seconds=time.monotonic() - started,
    )


async def _evaluate_if_due(desk: Desk, hub: HubClient, step: int, num_steps: int) -> None:
    """Evaluate the policy of this step. The trainer publishes no later one before the next wave is delivered."""
    if not evaluation_is_due(desk.config, step, num_steps):
        return
    folder = desk.config.data_dir_to_save_evals
    if folder is not None and result_path(folder, step).exists():
        log.info("evaluation_exists", step=step, path=str(result_path(folder, step)))
        return
    await _wait_for_step(hub, step)
    result = await evaluate_policy(desk, step, wave_prefix=f"{desk.name}-eval-{step}")
    if folder is not None:
        save_result(result, folder)
    log.info(
        "evaluated",
        step=step,
        policy_version=result.policy_version,
        accuracy=result.accuracy,
        low=result.interval_95[0],
        high=result.interval_95[1],
        prompts=result.num_prompts,
        seconds=result.seconds,
    )


async def _wait_for_step(hub: HubClient, step: int) -> None:
    """Wait until the trainer has taken so many steps. How long it may take is the trainer's business."""
    while True:
        status = await hub.status()
        if status.current_step >= step:
            return
        await asyncio.sleep(_STATUS_POLL_S)


async def _say_goodbye(hub: HubClient, env_id: int) -> None:
    """Best effort: the hub may be gone already, and whoever stops us is not kept waiting."""
    try:
        async with asyncio.timeout(_GOODBYE_S):
            await hub.disconnect(env_id)
    except (TreadleError, TimeoutError) as error:
        log.warning("not_disconnected", env_id=env_id, problem=str(error))
