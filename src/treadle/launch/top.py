"""`treadle top`: the view of `treadle run`, of a run that somebody else started, or is over."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from urllib.parse import quote

from rich.console import Console

from treadle.clock import awake_s
from treadle.config.load import load_run
from treadle.config.schema import RunConfig
from treadle.errors import ConfigError
from treadle.launch import folder as run_folders
from treadle.launch.history import HistoryReader, reader_of
from treadle.launch.overseer import Overseer
from treadle.launch.panel import draw
from treadle.launch.plan import CONFIG_FILE, LOG_FOLDER
from treadle.launch.probe import get_json
from treadle.launch.view import RunState, Screen, choose_view, current_phase
from treadle.launch.wording import program
from treadle.wire.tokens import HUB_TOKEN_VARIABLE, client_token
from treadle.wire.urls import shown_url, without_token

RUNS = Path("runs")
GONE_AFTER_S = 5.0
TICK_S = 0.25


def watch_run(run: Path | None, *, plain: bool, once: bool) -> int:
    """Until the run is over, or Ctrl-C; `once` prints one picture."""
    folder = find_run(run)
    config = load_run(folder / CONFIG_FILE, {})
    hub_url = _watch_url(config)
    history = reader_of(config, folder)
    overseer = Overseer(hub_url, dict, folder / LOG_FOLDER, stall_s=0.0)
    seconds_ago = max(0.0, time.time() - (folder / CONFIG_FILE).stat().st_mtime)  # written when it began or went on
    begun = time.monotonic() - seconds_ago
    state = RunState(config, folder.name, begun=begun, how_to_leave="Ctrl-C leaves, the run goes on")

    def refresh(state: RunState) -> None:
        overseer.look(None)
        _refresh(state, history, overseer, hub_url)

    if once:
        refresh(state)
        Console().print(draw(state.picture()))
    else:
        _watch(Screen(choose_view(plain=plain), state, refresh), overseer)
    if not overseer.sight.standings:
        print(f"this run is not going on now: its hub at {shown_url(hub_url)} does not answer", flush=True)
        if history.read().last_step < config.steps:
            print(run_folders.how_to_go_on(config, folder, history.read().last_step), flush=True)
    return 0


def _watch_url(config: RunConfig) -> str:
    """The hub with its token, from the file that the run was started with or from the environment."""
    token = os.environ.get(HUB_TOKEN_VARIABLE, "").strip()
    with contextlib.suppress(ConfigError):  # then the hub refuses, and the view says that it does not answer
        token = client_token(config.hub.token_file, "observer", token)
    hub_url = without_token(config.train.atropos_url)
    return f"{hub_url}/t/{quote(token, safe='')}" if token else hub_url


def _watch(screen: Screen, overseer: Overseer) -> None:
    heard_s = awake_s()
    with screen:
        while awake_s() - heard_s < GONE_AFTER_S:
            screen.tick()
            if overseer.sight.standings:
                heard_s = awake_s()
            time.sleep(TICK_S)


def find_run(run: Path | None) -> Path:
    """The folder that was named, or the newest in ./runs."""
    if run is not None:
        folder = run.expanduser().resolve()
        run_folders.check_is_run(folder)
        return folder
    runs = sorted(path for path in RUNS.glob("*") if (path / CONFIG_FILE).is_file())
    if not runs:
        raise ConfigError(f"there is no run in {RUNS}/", fix=f"name its folder: {program()} top FOLDER")
    return runs[-1].resolve()


def _refresh(state: RunState, history: HistoryReader, overseer: Overseer, hub_url: str) -> None:
    state.history = history.read()
    state.sight = overseer.sight
    state.phase = current_phase(state.history, state.config) if overseer.sight.standings else "not going on"
    state.memory_bytes = sum(standing.report.memory_bytes for standing in overseer.sight.standings)
    answer = get_json(f"{hub_url}/status")
    state.num_queued = None if answer is None else int(answer.get("queue_size", 0))
