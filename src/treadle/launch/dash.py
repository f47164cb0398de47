"""Show the page of a run, while it goes on or after its end (`treadle dash`)."""

from __future__ import annotations

import os
import threading
import time
from functools import partial
from pathlib import Path

from treadle.config.load import load_run
from treadle.config.schema import HubConfig, RunConfig
from treadle.dash import open_pages
from treadle.errors import ConfigError
from treadle.hub.process import serve
from treadle.launch.folder import is_going
from treadle.launch.page import RunPage
from treadle.launch.plan import CONFIG_FILE
from treadle.launch.ports import held_ports, port_of
from treadle.launch.probe import answers_ok
from treadle.launch.top import find_run, watch_url
from treadle.launch.wording import near, program
from treadle.wire.listening import HANDED_FD
from treadle.wire.urls import shown_url, url_to, without_token

LOOPBACK = "127.0.0.1"
OPEN_WITHIN_S = 10.0  # for the hub to answer, and for a browser to be started


def show_page(run: Path | None, *, opens: bool) -> int:
    """Open the page at the hub of a run that goes on; of one that is over, serve it here until Ctrl-C."""
    folder = find_run(run)
    config = load_run(folder / CONFIG_FILE)
    if is_going(folder) or config.hub_url:
        return _show_served(config, opens=opens)
    hub = _hub_of(folder, config)
    with held_ports({"hub": (LOOPBACK, config.hub.port)}) as listeners:
        listener = listeners["hub"]
        hub = hub.model_copy(update={"port": port_of(listener)})
        os.environ[HANDED_FD] = str(listener.detach())  # `serve` listens there
    page = _page_at(url_to(LOOPBACK, hub.port), config)
    print(f"{page.announcement(opens=opens)}; Ctrl-C ends it", flush=True)
    if opens:
        threading.Thread(target=_open_when_served, args=(page,), name="browser", daemon=True).start()
    serve(hub, pages=partial(open_pages, folder))
    return 0


def _show_served(config: RunConfig, *, opens: bool) -> int:
    page = _page_at(config.train.atropos_url, config)
    if not answers_ok(f"{page.watch_url}/healthz"):
        raise ConfigError(
            f"the hub of this run at {shown_url(page.hub_url)} does not answer", fix="start it again, or wait for it"
        )
    print(page.announcement(opens=opens), flush=True)
    if opens:
        page.open(within_s=OPEN_WITHIN_S)
    return 0


def _hub_of(folder: Path, config: RunConfig) -> HubConfig:
    """The settings of a hub that serves the recorded groups of a run, on this machine only."""
    moved = folder / config.hub.database.name
    database = moved if moved.is_file() else config.hub.database
    if not database.is_file():
        raise ConfigError(
            f"the queue of this run is gone: {database}; its page cannot be served",
            fix=f"{program()} report {near(folder)} writes what is left into one file",
        )
    values = {"host": LOOPBACK, "database": database, "run_folder": folder, "fresh": False}
    return config.hub.model_copy(update=values)


def _page_at(hub_url: str, config: RunConfig) -> RunPage:
    return RunPage(without_token(hub_url), watch_url(config, hub_url))


def _open_when_served(page: RunPage) -> None:
    until = time.monotonic() + OPEN_WITHIN_S
    while time.monotonic() < until and not answers_ok(f"{page.watch_url}/healthz"):
        time.sleep(0.1)
    page.open()
