"""The life of an environment process, in one of two paces.

waves    the prompts of a step side by side, so that the same seed gives the same curve
    until the last step is taken:
        which wave is next? (wave_count.py; wave w is what optimizer step w trains on)
        wait until step w-1-max_age is taken: the wave is sampled under that version
        evaluation due at that step?  evaluate; the version cannot change before the wave is delivered
        sample and score the wave  -->  deliver it as one list under one key
    The hub counts the groups that it has, so a restarted environment goes on with the first wave that the hub does not
    have; nothing here would have to be saved.

stream   group by group, as many as keep the engine busy and the data fresh (envs/serving/stream.py)
    Evaluations run beside training. Cursor and undelivered groups are on disk, so a killed process loses nothing.

Both: register --> others registered? --> evaluate before the first step --> ... --> evaluate after the last --> leave
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import quote

from treadle.config.env import EnvConfig
from treadle.config.keys import fitting_group_size
from treadle.config.load import replace_text
from treadle.envs.base import Environment
from treadle.envs.group_file import GroupFile
from treadle.envs.hub_client import HubClient
from treadle.envs.rollout import Desk
from treadle.envs.serving.course import Course, check_fills_batches, plan_course
from treadle.envs.serving.cursor import Cursor
from treadle.envs.serving.delivery import Delivery
from treadle.envs.serving.evaluations import STATUS_POLL_S, evaluate, evaluate_beside, evaluate_if_due
from treadle.envs.serving.pace import FlightLimit, choose_pace
from treadle.envs.serving.pause import Pause
from treadle.envs.serving.report import Ledger
from treadle.envs.serving.selection import ByDifficulty, InTurn, Selection
from treadle.envs.serving.spool import Spool
from treadle.envs.serving.stream import Stream, item_of
from treadle.envs.serving.tracking import open_tracking
from treadle.envs.serving.waves import Waves
from treadle.errors import ConfigError, HubError, TreadleError
from treadle.log import get_logger
from treadle.watch.waits import Wanted
from treadle.wire.groups import ScoredGroup
from treadle.wire.hub import RegisterEnv

log = get_logger("env")

_GOODBYE_S = 1.0

Keep = Callable[[ScoredGroup], None]  # writes a group to the file that the user asked for


async def run(desk: Desk, hub: HubClient, ledger: Ledger | None = None) -> None:
    """Deliver groups and evaluate when due; returns after the last evaluation. `ledger.report()` says how it stands."""
    ledger = ledger or Ledger(desk.config.name, hub.waits)
    config = desk.config
    pace = choose_pace(config, desk.environment)
    registered = await hub.register_env(_registration(desk))
    info = await hub.info()
    group_size = fitting_group_size(config.group_size, info.batch_size)
    if group_size != config.group_size:
        log.warning("group_size_follows", wished=config.group_size, batch_size=info.batch_size, group_size=group_size)
        desk.environment.config = config = config.model_copy(update={"group_size": group_size})
        registered = await hub.register_env(_registration(desk))
    if registered.env_id is None:
        raise HubError("the hub registered this environment and gave it no id", fix="see whether it is really a hub")
    ledger.env_id = registered.env_id
    if config.num_environments > 1:
        await _wait_for_others(hub, registered.env_id, config)
    course = plan_course(config, registered, info, (await hub.standing(registered.env_id)).share)
    if pace == "waves" and config.pace == "auto" and not course.is_alone:
        pace = "stream"  # a wave fills a whole batch, and others are there to fill it too
    log.info(
        "registered",
        name=desk.name,
        env_id=course.env_id,
        pace=pace,
        groups_accepted=course.groups_accepted,
        steps=course.num_steps,
    )
    try:
        # In a thread, because a service may be slow to answer: the process must hear a signal meanwhile.
        ledger.tracking = await asyncio.to_thread(open_tracking, config, desk.name, registered)
        with contextlib.ExitStack() as stack:
            path = config.data_path_to_save_groups
            keep = _keep_nothing if path is None else stack.enter_context(GroupFile(path)).write
            await (_run_waves if pace == "waves" else _run_stream)(desk, hub, course, ledger, keep)
    finally:
        await _say_goodbye(hub, course.env_id)
        await asyncio.to_thread(ledger.tracking.close)


async def _wait_for_others(hub: HubClient, env_id: int, config: EnvConfig) -> None:
    """Until all environments of the run are registered: before that the hub gives the share of the others away."""
    with Pause(hub.waits) as pause:
        while (present := (await hub.standing(env_id)).num_present) < config.num_environments:
            what = f"{config.num_environments - present} more of the {config.num_environments} environments to register"
            pause.wait_for(Wanted(what, of="env", deadline_s=config.trainer_patience_s))
            await asyncio.sleep(STATUS_POLL_S)


def _registration(desk: Desk) -> RegisterEnv:
    config = desk.config
    return RegisterEnv(
        max_token_length=config.max_token_length,
        desired_name=desk.name,
        weight=config.inference_weight,
        group_size=config.group_size,
        min_batch_allocation=config.min_batch_allocation,
    )


async def _run_waves(desk: Desk, hub: HubClient, course: Course, ledger: Ledger, keep: Keep) -> None:
    if not course.is_alone:
        log.warning("waves_fill_whole_batches", fix="with several environments: --env.pace stream")
    await Waves(desk, hub, course, ledger, keep).keep_going()


async def _run_stream(desk: Desk, hub: HubClient, course: Course, ledger: Ledger, keep: Keep) -> None:
    config = desk.config
    if not desk.environment.has_turns:
        check_fills_batches(course)
    folder = config.state_dir / quote(desk.name, safe="")
    folder.mkdir(parents=True, exist_ok=True)
    with _alone_in(folder):
        cursor, spool = Cursor(folder / "cursor.json"), Spool(folder)
        _begin_anew_in_a_new_run(folder, course, cursor, spool)
        for path in spool.waiting():  # killed between the two: the group was safe, and its item not yet done
            cursor.finish(item_of(spool.key_of(path)))
        selection = _selection(desk.environment, folder / "difficulty.json")
        async with Delivery(hub, spool) as delivery:
            stream = Stream(
                desk, course, cursor, selection, delivery, FlightLimit(config.max_num_workers), keep, ledger
            )
            if (await hub.status()).current_step == 0:
                await evaluate_if_due(desk, hub, course, ledger, 0)
            evaluating = asyncio.create_task(evaluate_beside(desk, hub, course, ledger, stream.limit))
            try:
                await stream.keep_going(hub, None if config.total_steps < 0 else config.total_steps)
            finally:
                evaluating.cancel()
                await asyncio.gather(evaluating, return_exceptions=True)
    if config.num_eval:
        await evaluate(desk, hub, course, ledger, (await hub.status()).current_step)


@contextlib.contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Two processes with one cursor would deliver each other's items."""
    with (folder / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"another environment process works in {folder}",
                fix="give this one a name of its own (--env.wandb-name), or another --env.state-dir",
            ) from None
        yield


def _keep_nothing(_: ScoredGroup) -> None:
    return None


def _selection(environment: Environment, path: Path) -> Selection:
    config = environment.config
    if config.sampling == "even":
        return InTurn()
    num_items = environment.num_train_items
    if num_items is None:
        raise ConfigError(
            f"the environment '{config.own_name}' does not list its items, so none can be preferred",
            fix="--env.sampling even",
        )
    return ByDifficulty(num_items, config.seed, path)


def _begin_anew_in_a_new_run(folder: Path, course: Course, cursor: Cursor, spool: Spool) -> None:
    """The items of another run begin again with the first, and what was left of the earlier one is put aside."""
    known = folder / "run"
    if known.is_file() and (earlier := known.read_text()) != course.run_id:
        aside = spool.put_aside(f"of-run-{quote(earlier, safe='') or 'unknown'}")
        log.info("new_run", groups_put_aside="none" if aside is None else str(aside), items_done_before=cursor.num_done)
        cursor.start_over()
        (folder / "difficulty.json").unlink(missing_ok=True)
    replace_text(known, course.run_id)


async def _say_goodbye(hub: HubClient, env_id: int) -> None:
    """Best effort: the hub may be gone already, and whoever stops us is not kept waiting."""
    try:
        async with asyncio.timeout(_GOODBYE_S):
            await hub.disconnect(env_id)
    except (TreadleError, TimeoutError) as error:
        log.warning("not_disconnected", env_id=env_id, problem=str(error))
