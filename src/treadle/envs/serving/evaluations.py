"""When the policy is evaluated in the course of a run: before the first step, after the last, and between."""

from __future__ import annotations

import asyncio

from treadle.config.env import EnvConfig
from treadle.envs.evaluation import evaluate_policy, result_path, save_result
from treadle.envs.hub_client import HubClient
from treadle.envs.rollout import Desk
from treadle.envs.serving.course import Course
from treadle.envs.serving.pace import FlightLimit
from treadle.envs.serving.pause import Pause, next_step
from treadle.envs.serving.report import Ledger
from treadle.envs.side_by_side import ROLLOUTS_AT_ONCE
from treadle.errors import TreadleError
from treadle.log import get_logger

log = get_logger("env")

STATUS_POLL_S = 0.05
_BESIDE_POLL_S = 1.0


def evaluation_is_due(config: EnvConfig, step: int, num_steps: int) -> bool:
    """Before the first step, after the last, and every `steps_per_eval` steps between."""
    if config.num_eval == 0:
        return False
    return step in (0, num_steps) or (config.steps_per_eval > 0 and step % config.steps_per_eval == 0)


async def evaluate_if_due(desk: Desk, hub: HubClient, course: Course, ledger: Ledger, step: int) -> None:
    if evaluation_is_due(desk.config, step, course.num_steps):
        await evaluate(desk, hub, course, ledger, step)


async def evaluate_beside(desk: Desk, hub: HubClient, course: Course, ledger: Ledger, limit: FlightLimit) -> None:
    """Evaluations between the first step and the last, on a part of the engine, while training goes on."""
    last = (await hub.status()).current_step  # what was due before was another life's
    while True:
        step = (await hub.status()).current_step
        due = [s for s in range(last + 1, step + 1) if s < course.num_steps]
        last = max(last, step)
        if any(evaluation_is_due(desk.config, s, course.num_steps) for s in due):
            at_once = max(1, int(desk.config.eval_limit_ratio * limit.value * course.group_size))
            try:
                await evaluate(desk, hub, course, ledger, step, rollouts_at_once=at_once)
            except TreadleError as error:
                log.error("evaluation_failed", step=step, problem=str(error))
        await asyncio.sleep(_BESIDE_POLL_S)


async def evaluate(
    desk: Desk, hub: HubClient, course: Course, ledger: Ledger, step: int, *, rollouts_at_once: int = ROLLOUTS_AT_ONCE
) -> None:
    """Evaluate the policy of this step. In waves, the trainer publishes no later one before the next is delivered."""
    folder = desk.config.data_dir_to_save_evals
    if folder is not None and result_path(folder, step).exists():
        log.info("evaluation_exists", step=step, path=str(result_path(folder, step)))
        return
    await wait_for_step(hub, step, desk.config.trainer_patience_s)
    num_prompts = min(desk.config.num_eval, len(desk.environment.eval_items()))
    with ledger.evaluating(step, num_prompts) as tell:
        result = await evaluate_policy(
            desk,
            step,
            wave_prefix=f"{desk.name}-eval-{step}",
            longest_sequence=course.longest_sequence,
            rollouts_at_once=rollouts_at_once,
            tell=tell,
        )
    if folder is not None:
        save_result(result, folder)
    ledger.tracking.log_evaluation(result)
    log.info(
        "evaluated",
        step=step,
        policy_version=result.policy_version,
        accuracy=result.accuracy,
        mean_score=result.mean_score,
        low=result.interval_95[0],
        high=result.interval_95[1],
        prompts=result.num_prompts,
        seconds=result.seconds,
    )


async def wait_for_step(hub: HubClient, step: int, patience_s: float) -> None:
    """Wait until the trainer has taken so many steps."""
    with Pause(hub.waits) as pause:
        while (taken := (await hub.status()).current_step) < step:
            pause.wait_for(next_step(taken, patience_s))
            await asyncio.sleep(STATUS_POLL_S)
