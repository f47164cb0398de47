"""Serve the page of a run, live or finished, or a start page that lists the runs of a folder (`treadle dash`).

The start page:
/                       start.html
/api/runs               the runs, newest first
/compare.html?runs=A/B  runs side by side, with the data of /api/comparison?runs=A/B
/runs/NAME/dash/        the page of a run, forwarded from the hub of the live run, or from a hub that is started here

Requests for a run are forwarded to its hub on this machine, so that one port is enough, also through an SSH tunnel.
If the hub is on another machine, the list shows its address.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import threading
import time
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path
from urllib.parse import quote

import aiohttp
import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from treadle.config.load import load_run
from treadle.config.schema import HubConfig, RunConfig
from treadle.dash.routes import open_pages
from treadle.dash.run_folder import RunFolder, task_of
from treadle.dash.web import HEADERS, INDEX, PageError, StaticFiles, answering_errors, as_json
from treadle.errors import ConfigError
from treadle.formatting import percent
from treadle.hub.process import serve
from treadle.launch.folder import is_run, is_run_live
from treadle.launch.hubs_of_runs import (
    IDLE_S,
    LOOPBACK,
    RunHubs,
    is_on_loopback,
    observer_token,
    origin_of,
    recorded_hub,
)
from treadle.launch.machine import held_ports, port_of
from treadle.launch.process_plan import CONFIG_FILE
from treadle.launch.top import find_run, watch_url
from treadle.launch.view import RunPage
from treadle.net.access import Access, AccessMiddleware, AccessRules
from treadle.net.access_tokens import HUB_TOKEN_VARIABLE, bearer_headers
from treadle.net.address import HANDED_FD, shown_url, url_to, without_token
from treadle.net.client import NoAnswer, PooledHttpClient
from treadle.net.probe import answers_ok
from treadle.net.server import serve_until_stopped
from treadle.report.comparison import compare_folders
from treadle.report.comparison_output import page_answer
from treadle.report.summary import load_summary

DEFAULT_PORT = HubConfig().port
OPEN_WITHIN_S = 10.0  # time for the hub to answer, and for a browser to start
START = "start.html"
MAX_RUNS = 200
MAX_COMPARED = 16  # runs on one page: their files are read for each request
# Routes that the page of a run uses, with or without a token. Other routes of a hub change its state, and the hub would
# not know that a browser asks, because its headers are not forwarded.
READABLE = re.compile(r"(?:t/[^/]+/)?(?:dash/(?!.*\.\.).*|v1/(?:status|processes|events))")
FORWARDED = ("accept", "last-event-id")
# A browser gets only data from a hub, and code only from here: a hub cannot run code in the pages of other runs.
FILE = re.compile(r"(?:t/[^/]+/)?dash/(?P<name>[^/]*)")
DATA_TYPES = ("application/json", "text/event-stream")


def show_page(run: Path | None, *, opens: bool) -> int:
    """Open the page of a live run at its hub; serve that of a finished run, or of a folder of runs, until Ctrl-C."""
    if run is not None and not (run.expanduser() / CONFIG_FILE).is_file():
        named = run.expanduser().resolve()
        if named.is_dir() and any(is_run(path) for path in named.iterdir()):
            return _serve_start_page(named, opens=opens)
    folder = find_run(run)
    config = load_run(folder / CONFIG_FILE)
    if (is_run_live(folder) and not config.is_supervised) or config.hub_url:
        return _show_served(config, opens=opens)
    with held_ports({"hub": (LOOPBACK, config.hub.port)}) as listeners:
        listener = listeners["hub"]
        hub = recorded_hub(folder, config, port_of(listener))
        os.environ[HANDED_FD] = str(listener.detach())  # `serve` listens there
    url = url_to(LOOPBACK, hub.port)
    page = RunPage(url, watch_url(config, url))
    print(f"{page.announcement(opens=opens)}; Ctrl-C ends it", flush=True)
    if opens:
        threading.Thread(target=_open_when_served, args=(page,), name="browser", daemon=True).start()
    serve(hub, pages=partial(open_pages, folder))
    return 0


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
        serve_until_stopped(AccessMiddleware(app, access), listeners["hub"], on_stop=lambda: None)
    return 0


def _show_served(config: RunConfig, *, opens: bool) -> int:
    page = RunPage(without_token(config.train.hub_url), watch_url(config, config.train.hub_url))
    if not answers_ok(f"{page.watch_url}/healthz"):
        raise ConfigError(
            f"the hub of this run at {shown_url(page.hub_url)} does not answer", fix="start it again, or wait for it"
        )
    print(page.announcement(opens=opens), flush=True)
    if opens:
        page.open(within_s=OPEN_WITHIN_S)
    return 0


def _open_when_served(page: RunPage) -> None:
    until = time.monotonic() + OPEN_WITHIN_S
    while time.monotonic() < until and not answers_ok(f"{page.watch_url}/healthz"):
        time.sleep(0.1)
    page.open()


# ---- start page


class RunRow(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    address: str = ""  # of the hub with its page, "http://gpu7:8000", if that is not forwarded
    task: str
    model: str
    state: str  # "live", "complete", "failed" or "stopped"
    error: str = ""  # the error that ended it
    steps_taken: int = 0
    steps: int | None = None
    held_out: str = ""  # "1.6 % → 73.0 %"
    interval: str = ""  # 95 % interval of the last one
    started_at: float = 0.0  # Unix time


class RunList:
    """The runs of a folder. Cheap to poll: files that did not change are not read again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._known: dict[str, RunFolder] = {}

    def names(self) -> list[str]:
        """Newest first, by the time in their names."""
        return [path.name for path in sorted(self.folder.iterdir(), reverse=True) if is_run(path)]

    def rows(self, names: list[str]) -> list[RunRow]:
        return [self._row(self._known.setdefault(name, RunFolder(self.folder / name))) for name in names]

    def _row(self, run: RunFolder) -> RunRow:
        config, summary, held_out = run.config(), load_summary(run.path), run.held_out()
        steps = config.get("steps")
        with run.metrics.columns() as columns:
            steps_taken = columns.steps[-1] if columns.steps else 0
        is_live = is_run_live(run.path)
        origin = origin_of(str((config.get("train") or {}).get("hub_url") or ""))
        is_elsewhere = not is_on_loopback(origin) if is_live else bool(config.get("hub_url"))
        if is_live:
            state = "live"
        elif summary is not None and summary.is_complete:
            state = "complete"
        else:
            state = "failed" if run.last_words() else "stopped"
        ends = [*held_out[:1], *held_out[1:][-1:]]
        return RunRow(
            name=run.name,
            address=origin if is_elsewhere else "",
            task=task_of(config),
            model=str(config.get("model") or ""),
            state=state,
            error=run.last_words() if state == "failed" else "",
            steps_taken=steps_taken,
            steps=steps if isinstance(steps, int) else None,
            held_out=" → ".join(percent(one.accuracy) for one in ends),
            interval=f"{100 * ends[-1].low:.1f} to {100 * ends[-1].high:.1f}" if ends else "",
            started_at=_started_at(run.path),
        )


@contextlib.contextmanager
def open_start_page(folder: Path, idle_s: float = IDLE_S) -> Iterator[Starlette]:
    hubs = RunHubs(idle_s)
    try:
        yield StartPage(RunList(folder), hubs).app()
    finally:
        hubs.close()


class ForwardedData(StreamingResponse):
    """Status and data from a hub, with the headers of this server; releases the hub when everything is sent."""

    def __init__(self, answer: aiohttp.ClientResponse, media_type: str, opened: contextlib.AsyncExitStack) -> None:
        headers = HEADERS | {"Cache-Control": "no-store", "Content-Type": media_type}
        super().__init__(answer.content.iter_any(), answer.status, headers)
        self._opened = opened

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._opened:
            await super().__call__(scope, receive, send)


class StartPage:
    def __init__(self, runs: RunList, hubs: RunHubs) -> None:
        self._runs = runs
        self._hubs = hubs
        self._files = StaticFiles()
        self._client = PooledHttpClient(
            "", timeout_s=None, connect_timeout_s=30.0, trust_env=False
        )  # events may be rare

    def app(self) -> Starlette:
        routes = {
            "/": self.index,
            "/api/runs": self.list_runs,
            "/api/comparison": self.compare,
            "/runs/{name}/{path:path}": self.forward,
            "/{name}": self.file,
        }

        @contextlib.asynccontextmanager
        async def lifespan(_: Starlette) -> AsyncIterator[None]:
            watch = asyncio.create_task(self._hubs.watch())
            yield
            await self._client.close()
            watch.cancel()

        return Starlette(
            routes=[Route(path, answering_errors(handler), methods=["GET"]) for path, handler in routes.items()],
            lifespan=lifespan,
        )

    async def index(self, request: Request) -> Response:
        return self._files.answer(request, START)

    async def file(self, request: Request) -> Response:
        return self._files.answer(request, request.path_params["name"])

    async def list_runs(self, _: Request) -> Response:
        names = self._runs.names()
        shown = names[:MAX_RUNS]
        return as_json(
            {
                "folder": str(self._runs.folder),
                "runs": await asyncio.to_thread(self._runs.rows, shown),
                "num_left_out": len(names) - len(shown),
            }
        )

    async def compare(self, request: Request) -> Response:
        names = list(dict.fromkeys(filter(None, request.query_params.get("runs", "").split("/"))))
        known = self._runs.names()
        unknown = next((name for name in names if name not in known), None)
        if unknown is not None:  # a name in a request never becomes a path
            raise PageError(404, f"there is no run {unknown[:100]!r} in {self._runs.folder}")
        if len(names) > MAX_COMPARED:
            raise PageError(422, f"{len(names)} runs were picked; at most {MAX_COMPARED} are compared here")
        try:
            found = await asyncio.to_thread(compare_folders, [self._runs.folder / name for name in names])
        except ConfigError as error:
            raise PageError(422, str(error)) from None
        return as_json(page_answer(found))

    async def forward(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in self._runs.names():  # a name in a request never becomes a path
            raise PageError(404, f"there is no run {name[:100]!r} in {self._runs.folder}")
        path = request.scope["raw_path"].decode("latin-1").split("/", 3)[3]
        if READABLE.fullmatch(path) is None:
            raise PageError(404, "only the page of a run is served here")
        query = f"?{request.url.query}" if request.url.query else ""
        headers = {name: request.headers[name] for name in FORWARDED if name in request.headers}
        async with contextlib.AsyncExitStack() as opened:
            try:
                hub = await opened.enter_async_context(self._hubs.use(self._runs.folder / name))
                # The guard of this server has checked the token of the browser.
                headers |= bearer_headers(hub.token) | {"accept-encoding": "identity"}
                stream = self._client.stream("GET", f"{hub.url}/{path}{query}", headers=headers)
                answer = await opened.enter_async_context(stream)
            except ConfigError as error:
                raise PageError(404, str(error)) from None
            except NoAnswer as error:
                raise PageError(502, f"the hub of {name} does not answer: {error}") from None
            file = FILE.fullmatch(path)
            if file is not None and 200 <= answer.status < 300:
                response = self._files.answer(request, file["name"] or INDEX)
            else:
                media_type = answer.headers.get("content-type", "").partition(";")[0].strip().lower()
                if media_type not in DATA_TYPES:
                    raise PageError(502, f"the hub of {name} answered with {media_type[:40]!r} instead of data")
                response = ForwardedData(answer, media_type, opened.pop_all())
        return response


def _started_at(folder: Path) -> float:
    """From the time in its name; the settings of a resumed run are newer."""
    try:
        return time.mktime(time.strptime(folder.name[:15], "%Y%m%d-%H%M%S"))
    except ValueError:
        return (folder / CONFIG_FILE).stat().st_mtime
