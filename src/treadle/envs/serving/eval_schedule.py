"""Evaluate the policy at the scheduled steps of a run: before the first step, after the last, and between."""

from __future__ import annotations

import asyncio

from treadle.config.env import EnvConfig
from treadle.envs.evaluation import evaluate_policy, result_path, save_result
from treadle.envs.hub_client import CurrentWait, HubClient, next_step
from treadle.envs.rollout import ROLLOUTS_AT_ONCE, EnvContext
from treadle.envs.serving.assignment import InFlightLimit, RunAssignment
from treadle.envs.serving.monitor import EnvMonitor
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


async def evaluate_if_due(
    context: EnvContext, hub: HubClient, assignment: RunAssignment, monitor: EnvMonitor, step: int
) -> None:
    if evaluation_is_due(context.config, step, assignment.num_steps):
        await evaluate(context, hub, assignment, monitor, step)


async def evaluate_during_training(
    context: EnvContext, hub: HubClient, assignment: RunAssignment, monitor: EnvMonitor, limit: InFlightLimit
) -> None:
    """Run the evaluations between the first and the last step on a share of the engine, while training continues."""
    last = (await hub.status()).current_step  # earlier ones were due before this process started
    while True:
        step = (await hub.status()).current_step
        due = [s for s in range(last + 1, step + 1) if s < assignment.num_steps]
        last = max(last, step)
        if any(evaluation_is_due(context.config, s, assignment.num_steps) for s in due):
            at_once = max(1, int(context.config.eval_limit_ratio * limit.value * assignment.group_size))
            try:
                await evaluate(context, hub, assignment, monitor, step, rollouts_at_once=at_once)
            except TreadleError as error:
                log.error("evaluation_failed", step=step, problem=str(error))
        await asyncio.sleep(_BESIDE_POLL_S)


async def evaluate(
    context: EnvContext,
    hub: HubClient,
    assignment: RunAssignment,
    monitor: EnvMonitor,
    step: int,
    *,
    rollouts_at_once: int = ROLLOUTS_AT_ONCE,
) -> None:
    """Evaluate the policy of this step. In waves, the trainer publishes no later version before the next wave."""
    folder = context.config.data_dir_to_save_evals
    if folder is not None and result_path(folder, step).exists():
        log.info("evaluation_exists", step=step, path=str(result_path(folder, step)))
        return
    await wait_for_step(hub, step)
    num_prompts = min(context.config.num_eval, len(context.environment.eval_items()))
    with monitor.track_evaluation(step, num_prompts) as report_progress:
        result = await evaluate_policy(
            context,
            step,
            wave_prefix=f"{context.name}-eval-{step}",
            longest_sequence=assignment.longest_sequence,
            rollouts_at_once=rollouts_at_once,
            report_progress=report_progress,
        )
    if folder is not None:
        save_result(result, folder)
    monitor.tracking.log_evaluation(result)
    log.info(
        "evaluated",
        step=step,
        policy_version=result.policy_version,
        accuracy=result.accuracy,
        mean_score=result.mean_score,
        mean_score_interval_95=result.mean_score_interval_95,
        low=result.interval_95[0],
        high=result.interval_95[1],
        prompts=result.num_prompts,
        seconds=result.seconds,
    )
    if result.num_unscored:
        log.warning(
            "evaluation_unscored",
            step=step,
            unscored=result.num_unscored,
            of=result.num_answers + result.num_unscored,
            outcomes=result.unscored,
            now="they are in no figure of this evaluation",
        )


async def wait_for_step(hub: HubClient, step: int) -> None:
    """Wait until the trainer has taken `step` steps."""
    with CurrentWait(hub.waits) as current_wait:
        while (taken := (await hub.status()).current_step) < step:
            current_wait.set(next_step(taken))
            await asyncio.sleep(STATUS_POLL_S)
