"""Run an environment process: register at the hub, deliver groups, evaluate when due, disconnect.

There are two paces:

waves    all prompts of a step together, so that the same seed gives the same curve (waves.py)
    until the last step is taken:
        compute the next wave w, the batch of optimizer step w
        wait until step w-1-max_age is taken: the wave is sampled with that policy version
        run the evaluation of that step if one is due; the version cannot change before the wave is delivered
        sample and score the wave, deliver it as one list under one key
    The hub counts accepted groups, so a restarted environment continues with the first missing wave; there is no state
    to save.

stream   group by group, enough at once to keep the engine busy and few enough to keep the data fresh (stream.py)
    Evaluations run during training. The cursor and undelivered groups are on disk, so a killed process loses nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import quote

from treadle.config.env import EnvConfig, parse_part
from treadle.config.load import replace_text
from treadle.config.values import fitting_group_size
from treadle.envs.base import Environment
from treadle.envs.group_file import GroupFile
from treadle.envs.hub_client import STEP_LATE_S, CurrentWait, HubClient
from treadle.envs.rollout import EnvContext
from treadle.envs.serving.assignment import (
    InFlightLimit,
    RunAssignment,
    check_can_fill_batches,
    choose_pace,
    make_assignment,
)
from treadle.envs.serving.eval_schedule import STATUS_POLL_S, evaluate, evaluate_during_training, evaluate_if_due
from treadle.envs.serving.monitor import EnvMonitor, open_tracking
from treadle.envs.serving.stream import StreamRunner, item_of_key
from treadle.envs.serving.stream_state import Delivery, DifficultySelection, ItemCursor, Spool
from treadle.envs.serving.waves import WaveRunner
from treadle.errors import ConfigError, HubError, TreadleError
from treadle.log import get_logger
from treadle.watch.waits import WaitSpec
from treadle.wire.groups import ScoredGroup
from treadle.wire.hub import RegisterEnv

log = get_logger("env")

_GOODBYE_S = 1.0

SaveGroup = Callable[[ScoredGroup], None]  # writes a group to the file that the user asked for


async def run(context: EnvContext, hub: HubClient, monitor: EnvMonitor | None = None) -> None:
    """Deliver groups and evaluate when due; returns after the last evaluation. `monitor.report()` has the state."""
    monitor = monitor or EnvMonitor(context.config.name, hub.waits)
    config = context.config
    pace = choose_pace(config, context.environment)
    registered = await hub.register_env(_registration(context))
    info = await hub.info()
    group_size = fitting_group_size(config.group_size, info.batch_size)
    if group_size != config.group_size:
        log.warning("group_size_follows", wished=config.group_size, batch_size=info.batch_size, group_size=group_size)
        context.environment.config = config = config.model_copy(update={"group_size": group_size})
        registered = await hub.register_env(_registration(context))
    if registered.env_id is None:
        raise HubError("the hub registered this environment and gave it no id", fix="see whether it is really a hub")
    monitor.env_id = registered.env_id
    folder = config.state_dir / quote(context.name, safe="")
    context.judge.keep_state_in(folder / f"judge-{quote(registered.run_id, safe='')[:8]}")
    if config.num_environments > 1:
        await _wait_for_others(hub, registered.env_id, config)
    assignment = make_assignment(config, registered, info, (await hub.standing(registered.env_id)).share)
    if pace == "waves" and config.pace == "auto" and not assignment.is_alone:
        pace = "stream"  # a wave fills a whole batch, which other environments fill too
    log.info(
        "registered",
        name=context.name,
        env_id=assignment.env_id,
        pace=pace,
        groups_accepted=assignment.groups_accepted,
        steps=assignment.num_steps,
    )
    try:
        # In a thread, because a tracking service may be slow: signals must still be handled.
        monitor.tracking = await asyncio.to_thread(open_tracking, config, context.name, registered)
        with contextlib.ExitStack() as stack:
            path = config.data_path_to_save_groups
            save_group: SaveGroup = (lambda _: None) if path is None else stack.enter_context(GroupFile(path)).write
            if pace == "stream":
                await _run_stream(context, hub, assignment, monitor, save_group)
            else:
                if not assignment.is_alone:
                    log.warning("waves_fill_whole_batches", fix="with several environments: --env.pace stream")
                await WaveRunner(context, hub, assignment, monitor, save_group).run()
    finally:
        await _disconnect(hub, assignment.env_id)
        await asyncio.to_thread(monitor.tracking.close)


async def _wait_for_others(hub: HubClient, env_id: int, config: EnvConfig) -> None:
    """Wait until all environments of the run are registered: until then the hub redistributes their shares."""
    with CurrentWait(hub.waits) as current_wait:
        while (present := (await hub.standing(env_id)).num_present) < config.num_environments:
            what = f"{config.num_environments - present} more of the {config.num_environments} environments to register"
            current_wait.set(WaitSpec(what, of="env", deadline_s=STEP_LATE_S))
            await asyncio.sleep(STATUS_POLL_S)


def _registration(context: EnvContext) -> RegisterEnv:
    config = context.config
    return RegisterEnv(
        max_token_length=config.max_token_length,
        desired_name=context.name,
        weight=config.inference_weight,
        group_size=config.group_size,
        min_batch_allocation=config.min_batch_allocation,
    )


async def _run_stream(
    context: EnvContext, hub: HubClient, assignment: RunAssignment, monitor: EnvMonitor, save_group: SaveGroup
) -> None:
    config = context.config
    if not context.environment.has_turns:
        check_can_fill_batches(assignment)
    folder = config.state_dir / quote(context.name, safe="")
    folder.mkdir(parents=True, exist_ok=True)
    with _lock_folder(folder):
        cursor, spool = ItemCursor(folder / "cursor.json", *parse_part(config.items)), Spool(folder)
        _reset_for_new_run(folder, assignment, cursor, spool)
        for path in spool.waiting():  # killed between spooling a group and saving the cursor
            cursor.finish(item_of_key(spool.key(path)))
        selection = _selection(context.environment, folder / "difficulty.json")
        async with Delivery(hub, spool) as delivery:
            stream = StreamRunner(
                context,
                assignment,
                cursor,
                selection,
                delivery,
                InFlightLimit(config.max_num_workers),
                save_group,
                monitor,
            )
            if (await hub.status()).current_step == 0:
                await evaluate_if_due(context, hub, assignment, monitor, 0)
            evaluating = asyncio.create_task(evaluate_during_training(context, hub, assignment, monitor, stream.limit))
            try:
                await stream.run(hub, None if config.total_steps < 0 else config.total_steps)
            finally:
                evaluating.cancel()
                await asyncio.gather(evaluating, return_exceptions=True)
    if config.num_eval:
        await evaluate(context, hub, assignment, monitor, (await hub.status()).current_step)


@contextlib.contextmanager
def _lock_folder(folder: Path) -> Iterator[None]:
    """Lock the state folder: two processes with one cursor would deliver each other's items."""
    with (folder / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"another environment process works in {folder}",
                fix="give this one a name of its own (--env.wandb-name), or another --env.state-dir",
            ) from None
        yield


def _selection(environment: Environment, path: Path) -> DifficultySelection | None:
    config = environment.config
    if config.sampling == "even":
        return None
    if type(environment).train_items is Environment.train_items:
        raise ConfigError(
            f"the environment '{config.own_name}' does not list its items, so none can be preferred",
            fix="--env.sampling even",
        )
    return DifficultySelection(environment.candidate, config.seed, path)


def _reset_for_new_run(folder: Path, assignment: RunAssignment, cursor: ItemCursor, spool: Spool) -> None:
    """If the state is of another run, start over with the first item and set undelivered groups aside."""
    known = folder / "run"
    if known.is_file() and (earlier := known.read_text()) != assignment.run_id:
        aside = spool.put_aside(f"of-run-{quote(earlier, safe='') or 'unknown'}")
        log.info("new_run", groups_put_aside="none" if aside is None else str(aside), items_done_before=cursor.num_done)
        cursor.start_over()
        (folder / "difficulty.json").unlink(missing_ok=True)
    replace_text(known, assignment.run_id)


async def _disconnect(hub: HubClient, env_id: int) -> None:
    """Best effort: the hub may be gone already, and a stop must not be delayed."""
    try:
        async with asyncio.timeout(_GOODBYE_S):
            await hub.disconnect(env_id)
    except (TreadleError, TimeoutError) as error:
        log.warning("not_disconnected", env_id=env_id, problem=str(error))
