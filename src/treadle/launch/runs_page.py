"""Serve a start page that lists the runs of a folder, and the page of each run below it (`treadle dash FOLDER`).

/                       start.html
/api/runs               the runs, the newest first
/runs/NAME/dash/        the page of a run, from its hub: the hub of a run that is live, else one that is started here

Requests for a run are forwarded to its hub on this machine, so that one port is enough, also through an SSH tunnel.
Where the hub is elsewhere, the list shows its address.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from treadle.dash.query import Unanswerable, as_json, telling
from treadle.dash.run_folder import RunFolder, task_of
from treadle.dash.static import HEADERS, INDEX, StaticFiles
from treadle.errors import ConfigError
from treadle.formatting import percent
from treadle.launch.folder import is_going, is_run
from treadle.launch.plan import CONFIG_FILE
from treadle.launch.report import load_summary
from treadle.launch.run_hubs import IDLE_S, RunHubs, is_on_loopback, origin_of
from treadle.net.tokens import bearer_headers

START = "start.html"
MAX_RUNS = 200
# What the page of a run asks for, behind a token or not. Other routes of a hub have effects, and the hub could not tell
# that a browser asks: its headers are not forwarded.
READABLE = re.compile(r"(?:t/[^/]+/)?(?:dash/(?!.*\.\.).*|v1/(?:status|processes|events))")
FORWARDED = ("accept", "last-event-id")
# A browser gets only data from a hub, and all code from here: a hub cannot run anything in the pages of other runs.
FILE = re.compile(r"(?:t/[^/]+/)?dash/(?P<name>[^/]*)")
DATA_TYPES = ("application/json", "text/event-stream")


class RunRow(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    address: str = ""  # of the hub that has its page, "http://gpu7:8000", where that is not forwarded
    task: str
    model: str
    state: str  # "live", "complete", "failed" or "stopped"
    error: str = ""  # that ended it
    steps_taken: int = 0
    steps: int | None = None
    held_out: str = ""  # "1.6 % → 73.0 %"
    interval: str = ""  # 95 %, of the last one
    started_at: float = 0.0  # Unix time


class RunList:
    """The runs of a folder. May be asked every few seconds: files that did not change are not read again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._known: dict[str, RunFolder] = {}

    def names(self) -> list[str]:
        """The newest first, by the time in their names."""
        return [path.name for path in sorted(self.folder.iterdir(), reverse=True) if is_run(path)]

    def rows(self, names: list[str]) -> list[RunRow]:
        return [self._row(self._known.setdefault(name, RunFolder(self.folder / name))) for name in names]

    def _row(self, run: RunFolder) -> RunRow:
        config, summary, held_out = run.config(), load_summary(run.path), run.held_out()
        steps = config.get("steps")
        with run.metrics.columns() as columns:
            steps_taken = columns.steps[-1] if columns.steps else 0
        is_live = is_going(run.path)
        origin = origin_of(str((config.get("train") or {}).get("atropos_url") or ""))
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
    """The status and data of a hub, with the headers of this server; releases the hub when all is sent."""

    def __init__(self, answer: httpx.Response, media_type: str, opened: contextlib.AsyncExitStack) -> None:
        headers = HEADERS | {"Cache-Control": "no-store", "Content-Type": media_type}
        super().__init__(answer.aiter_raw(), answer.status_code, headers)
        self._opened = opened

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._opened:
            await super().__call__(scope, receive, send)


class StartPage:
    def __init__(self, runs: RunList, hubs: RunHubs) -> None:
        self._runs = runs
        self._hubs = hubs
        self._files = StaticFiles()
        self._client = httpx.AsyncClient(timeout=httpx.Timeout(30.0, read=None), trust_env=False)  # events may be rare

    def app(self) -> Starlette:
        routes = {
            "/": self.index,
            "/api/runs": self.list_runs,
            "/runs/{name}/{path:path}": self.forward,
            "/{name}": self.file,
        }

        @contextlib.asynccontextmanager
        async def lifespan(_: Starlette) -> AsyncIterator[None]:
            watch = asyncio.create_task(self._hubs.watch())
            async with self._client:
                yield
            watch.cancel()

        return Starlette(
            routes=[Route(path, telling(handler), methods=["GET"]) for path, handler in routes.items()],
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

    async def forward(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in self._runs.names():  # a name from outside never becomes a path
            raise Unanswerable(404, f"there is no run {name[:100]!r} in {self._runs.folder}")
        path = request.scope["raw_path"].decode("latin-1").split("/", 3)[3]
        if READABLE.fullmatch(path) is None:
            raise Unanswerable(404, "only the page of a run is served here")
        query = f"?{request.url.query}" if request.url.query else ""
        headers = {name: request.headers[name] for name in FORWARDED if name in request.headers}
        async with contextlib.AsyncExitStack() as opened:
            try:
                hub = await opened.enter_async_context(self._hubs.use(self._runs.folder / name))
                # The guard in front has asked the browser for the token.
                headers |= bearer_headers(hub.token) | {"accept-encoding": "identity"}
                asked = self._client.build_request("GET", f"{hub.url}/{path}{query}", headers=headers)
                answer = await self._client.send(asked, stream=True)
            except ConfigError as error:
                raise Unanswerable(404, str(error)) from None
            except httpx.TransportError as error:
                raise Unanswerable(502, f"the hub of {name} does not answer: {error!r}") from None
            opened.push_async_callback(answer.aclose)
            file = FILE.fullmatch(path)
            if file is not None and answer.is_success:
                response = self._files.answer(request, file["name"] or INDEX)
            else:
                media_type = answer.headers.get("content-type", "").partition(";")[0].strip().lower()
                if media_type not in DATA_TYPES:
                    raise Unanswerable(502, f"the hub of {name} answered with {media_type[:40]!r} instead of data")
                response = ForwardedData(answer, media_type, opened.pop_all())
        return response


def _started_at(folder: Path) -> float:
    """By the time in its name; the settings of a run that was resumed are newer."""
    try:
        return time.mktime(time.strptime(folder.name[:15], "%Y%m%d-%H%M%S"))
    except ValueError:
        return (folder / CONFIG_FILE).stat().st_mtime
