"""Show the page of a run, live or finished, or a start page that lists the runs of a folder (`treadle dash`)."""

from __future__ import annotations

import os
import threading
import time
from functools import partial
from pathlib import Path
from urllib.parse import quote

from treadle.config.load import load_run
from treadle.config.schema import HubConfig, RunConfig
from treadle.dash import open_pages
from treadle.errors import ConfigError
from treadle.hub.process import serve
from treadle.launch.folder import is_going, is_run
from treadle.launch.page import RunPage
from treadle.launch.plan import CONFIG_FILE
from treadle.launch.ports import held_ports, port_of
from treadle.launch.run_hubs import LOOPBACK, observer_token, recorded_hub
from treadle.launch.runs_page import open_start_page
from treadle.launch.top import find_run, watch_url
from treadle.net.access import Access, AccessRules, Guard
from treadle.net.listening import HANDED_FD
from treadle.net.probe import answers_ok
from treadle.net.server import serve_until_stopped
from treadle.net.tokens import HUB_TOKEN_VARIABLE
from treadle.net.urls import shown_url, url_to, without_token

DEFAULT_PORT = HubConfig().port
OPEN_WITHIN_S = 10.0  # for the hub to answer, and for a browser to be started


def show_page(run: Path | None, *, opens: bool) -> int:
    """Open the page at the hub of a live run. Serve that of a finished run, or of a folder of runs, until Ctrl-C."""
    if run is not None and not (run.expanduser() / CONFIG_FILE).is_file() and _holds_runs(run.expanduser()):
        return _serve_start_page(run.expanduser().resolve(), opens=opens)
    folder = find_run(run)
    config = load_run(folder / CONFIG_FILE)
    if is_going(folder) or config.hub_url:
        return _show_served(config, opens=opens)
    with held_ports({"hub": (LOOPBACK, config.hub.port)}) as listeners:
        listener = listeners["hub"]
        hub = recorded_hub(folder, config, port_of(listener))
        os.environ[HANDED_FD] = str(listener.detach())  # `serve` listens there
    page = _page_at(url_to(LOOPBACK, hub.port), config)
    print(f"{page.announcement(opens=opens)}; Ctrl-C ends it", flush=True)
    if opens:
        threading.Thread(target=_open_when_served, args=(page,), name="browser", daemon=True).start()
    serve(hub, pages=partial(open_pages, folder))
    return 0


def _holds_runs(folder: Path) -> bool:
    return folder.is_dir() and any(is_run(path) for path in folder.iterdir())


def _serve_start_page(folder: Path, *, opens: bool) -> int:
    rules = AccessRules(process="start page", host=LOOPBACK, token_variable=HUB_TOKEN_VARIABLE)
    access = Access.of(rules, os.environ)
    with held_ports({"hub": (LOOPBACK, DEFAULT_PORT)}) as listeners, open_start_page(folder) as app:
        url = url_to(LOOPBACK, port_of(listeners["hub"]))
        token = observer_token()
        page = RunPage(url, f"{url}/t/{quote(token, safe='')}" if token else url, path="/")
        print(f"{page.announcement(opens=opens)}; Ctrl-C ends it", flush=True)
        if opens:
            page.open()
        serve_until_stopped(Guard(app, access), listeners["hub"], on_stop=lambda: None)
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


def _page_at(hub_url: str, config: RunConfig) -> RunPage:
    return RunPage(without_token(hub_url), watch_url(config, hub_url))


def _open_when_served(page: RunPage) -> None:
    until = time.monotonic() + OPEN_WITHIN_S
    while time.monotonic() < until and not answers_ok(f"{page.watch_url}/healthz"):
        time.sleep(0.1)
    page.open()
