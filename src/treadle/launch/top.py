"""Show a run from another terminal, live or finished (`treadle top`)."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from urllib.parse import quote

from rich.console import Console

from treadle.background import awake_s
from treadle.config.load import load_run
from treadle.config.schema import RunConfig
from treadle.errors import ConfigError
from treadle.formatting import near, program
from treadle.launch import folder as run_folders
from treadle.launch.monitor import RunMonitor
from treadle.launch.process_plan import CONFIG_FILE, LOG_FOLDER
from treadle.launch.view import View, ViewState, choose_view, current_phase, draw
from treadle.log import get_logger
from treadle.net.access_tokens import HUB_TOKEN_VARIABLE, client_token
from treadle.net.address import shown_url, without_token
from treadle.net.probe import get_json
from treadle.report.history import HistoryReader, check_is_run, reader_of
from treadle.report.summary import Summary, load_summary, result_in_words

log = get_logger("top")

RUNS = Path("runs")
GONE_AFTER_S = 5.0
TICK_S = 0.25
LOCK_POLL_S = 1.0


def watch_run(run: Path | None, *, plain: bool, once: bool) -> int:
    """Show the run until it ends, standard output is closed, or Ctrl-C; `once` prints the panel once."""
    folder = find_run(run)
    config = load_run(folder / CONFIG_FILE, {})
    if config.is_supervised:
        raise ConfigError(
            f"{folder} is a supervised run, which has no hub to ask; treadle sft prints its steps itself",
            fix=f"{program()} dash {near(folder)}",
        )
    hub_url = watch_url(config, config.train.hub_url)
    history = reader_of(config, folder)
    monitor = RunMonitor(hub_url, dict, folder / LOG_FOLDER, stall_s=0.0)
    # The configuration is written at the start and when the run is resumed.
    seconds_ago = max(0.0, time.time() - (folder / CONFIG_FILE).stat().st_mtime)
    begun = time.monotonic() - seconds_ago
    state = ViewState(config, folder.name, begun=begun, how_to_leave="Ctrl-C leaves, the run continues")

    finished = finished_summary(folder, config.steps)
    if finished is not None:  # its hub has ended, and another run may use its address now
        state.history, state.phase, state.how_to_leave = history.read(), "complete", ""
        state.begun = time.monotonic() - finished.total_s
        if once:
            Console().print(draw(state))
        print(f"this run is complete: {result_in_words(finished)}", flush=True)
        return 0

    refresh = partial(_refresh, history=history, monitor=monitor, hub_url=hub_url, folder=folder)
    if once:
        refresh(state)
        Console().print(draw(state))
        is_over = not monitor.status.standings
    else:
        _watch(choose_view(plain=plain), state, refresh, folder)
        is_over = True
    if is_over:
        _print_end(folder, config, hub_url, history.read().last_step)
    return 0


def finished_summary(folder: Path, steps: int) -> Summary | None:
    """The summary of a complete run; None while it is live, or if it ended early."""
    if run_folders.is_run_live(folder):
        return None
    summary = load_summary(folder)
    return summary if summary is not None and summary.is_complete and summary.steps_taken >= steps else None


def _print_end(folder: Path, config: RunConfig, hub_url: str, last_step: int) -> None:
    finished, summary = finished_summary(folder, config.steps), load_summary(folder)
    if finished is not None:
        print(f"this run is complete: {result_in_words(finished)}", flush=True)
        return
    if summary is not None and summary.last_words and not run_folders.is_run_live(folder):
        print(f"this run failed after step {last_step}: {summary.last_words}", flush=True)
    else:
        print(f"this run is stopped: its hub at {shown_url(hub_url)} does not answer", flush=True)
    if last_step < config.steps:
        print(run_folders.resume_advice(config, folder, last_step), flush=True)


def watch_url(config: RunConfig, hub_url: str) -> str:
    """The URL of a hub with its token, from the file that the run was started with or from the environment."""
    token = os.environ.get(HUB_TOKEN_VARIABLE, "").strip()
    with contextlib.suppress(ConfigError):  # then the hub refuses, and the view shows no answer
        token = client_token(config.hub.token_file, "observer", token)
    hub_url = without_token(hub_url)
    return f"{hub_url}/t/{quote(token, safe='')}" if token else hub_url


def _watch(view: View, state: ViewState, refresh: Callable[[ViewState], None], folder: Path) -> None:
    """Update until the launcher releases the lock of the folder or, if it is on another machine, the hub is silent."""
    answered_s = checked_s = awake_s()
    was_live = run_folders.is_run_live(folder)
    view.open()
    try:
        while was_live or awake_s() - answered_s < GONE_AFTER_S:  # a starting hub does not answer yet
            try:
                refresh(state)
                view.update(state)
            except BrokenPipeError:
                raise
            except Exception as error:  # a half-written file, an odd answer: the next attempt may succeed
                log.debug("refresh_failed", error=repr(error))
            if state.status.standings:
                answered_s = awake_s()
            if awake_s() - checked_s >= LOCK_POLL_S:
                is_live, checked_s = run_folders.is_run_live(folder), awake_s()
                if was_live and not is_live:
                    return
                was_live = is_live
            if _is_reader_gone():
                raise BrokenPipeError
            time.sleep(TICK_S)
    finally:
        view.close()


def _is_reader_gone() -> bool:
    """Whether standard output is a closed pipe, as after `| head -3`."""
    try:
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)
        return bool(poll.poll(0))
    except (OSError, ValueError):  # not a real file
        return False


def find_run(run: Path | None) -> Path:
    """The folder that was named, or the newest in ./runs."""
    if run is not None:
        folder = run.expanduser().resolve()
        check_is_run(folder)
        return folder
    return run_folders.newest_run(RUNS).resolve()


def _refresh(state: ViewState, history: HistoryReader, monitor: RunMonitor, hub_url: str, folder: Path) -> None:
    monitor.poll(None)
    state.history = history.read()
    state.status = monitor.status
    is_live = bool(monitor.status.standings) or run_folders.is_run_live(folder)
    if is_live and not monitor.status.standings and not state.history.steps:
        state.phase = "waiting for the hub"
    elif is_live:
        state.phase = current_phase(state.history, state.config)
    else:
        state.phase = "complete" if finished_summary(folder, state.config.steps) else "stopped"
    state.memory_bytes = sum(standing.report.memory_bytes for standing in monitor.status.standings)
    answer = get_json(f"{hub_url}/status")
    state.num_queued = None if answer is None else int(answer.get("queue_size", 0))
