"""Serve a start page that lists the runs of a folder, and the page of each run below it (`treadle dash FOLDER`).

/                       start.html
/api/runs               the runs, the newest first
/runs/NAME/dash/        the page of a run, from its hub: the hub of a run that is live, else one that is started here

Requests for a run are forwarded to its hub, so that one port is enough, also through an SSH tunnel.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from treadle.config.load import load_run, parse
from treadle.config.schema import HubConfig, RunConfig
from treadle.dash.query import Unanswerable, as_json, telling
from treadle.dash.run_folder import RunFolder, task_of
from treadle.dash.static import StaticFiles
from treadle.errors import ConfigError
from treadle.launch.folder import is_going, is_run
from treadle.launch.plan import CONFIG_FILE
from treadle.launch.ports import port_of
from treadle.launch.report import load_summary
from treadle.launch.wording import near, percent, program
from treadle.wire.listening import HANDED_FD, take_port
from treadle.wire.tokens import HUB_TOKEN_VARIABLE, bearer_headers, role_token
from treadle.wire.urls import url_to, without_token

LOOPBACK = "127.0.0.1"
START = "start.html"
MAX_RUNS = 200
MAX_HUBS = 4  # that are open for runs that are over; the one opened first gives way
# What the page of a run asks for, behind a token or not. Other routes of a hub have effects, and the hub could not tell
# that a browser asks: its headers are not forwarded.
READABLE = re.compile(r"(?:t/[^/]+/)?(?:dash/(?!.*\.\.).*|v1/(?:status|processes|events))")
FORWARDED = ("accept", "if-none-match", "last-event-id")
NOT_RETURNED = frozenset({"connection", "keep-alive", "transfer-encoding", "content-length"})


class RunRow(msgspec.Struct, frozen=True, kw_only=True):
    name: str
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
        if is_going(run.path):
            state = "live"
        elif summary is not None and summary.is_complete:
            state = "complete"
        else:
            state = "failed" if run.last_words() else "stopped"
        ends = [*held_out[:1], *held_out[1:][-1:]]
        return RunRow(
            name=run.name,
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


def recorded_hub(folder: Path, config: RunConfig, port: int) -> HubConfig:
    """The settings of a hub that serves the recorded groups of a run, on this machine only."""
    moved = folder / config.hub.database.name
    database = moved if moved.is_file() else config.hub.database
    if not database.is_file():
        raise ConfigError(
            f"the queue of this run is gone: {database}; its page cannot be served",
            fix=f"{program()} report {near(folder)} writes what is left into one file",
        )
    own = {"host": LOOPBACK, "port": port, "database": database, "run_folder": folder, "fresh": False}
    values = config.hub.model_dump() | own | {"validation_workers": 1}
    return parse(HubConfig, values, source=str(folder / CONFIG_FILE))


class RunHubs:
    """The address of each run's hub; for a run that is over, `treadle dash RUN` is started as a child process."""

    def __init__(self) -> None:
        self._children: dict[Path, tuple[subprocess.Popen[bytes], str]] = {}

    def url_of(self, folder: Path) -> str:
        config = load_run(folder / CONFIG_FILE)
        if is_going(folder) or config.hub_url:
            self._end(folder)  # a resumed run has its own hub again
            return without_token(config.train.atropos_url)
        recorded_hub(folder, config, config.hub.port)  # raises where the child could not serve it
        known = self._children.get(folder)
        if known is not None and known[0].poll() is None:
            return known[1]
        for oldest in list(self._children)[: len(self._children) - MAX_HUBS + 1]:
            self._end(oldest)
        with contextlib.closing(take_port(LOOPBACK, 0)) as listener:  # requests wait there until the child answers
            os.set_inheritable(listener.fileno(), True)
            child = subprocess.Popen(
                [sys.executable, "-m", "treadle", "dash", str(folder), "--no-open"],
                env=os.environ | {HANDED_FD: str(listener.fileno())},
                pass_fds=[listener.fileno()],
                stdout=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for this process, which ends its children
            )
            self._children[folder] = child, url_to(LOOPBACK, port_of(listener))
        return self._children[folder][1]

    def _end(self, folder: Path) -> None:
        known = self._children.pop(folder, None)
        if known is not None:
            known[0].terminate()
            known[0].wait()

    def close(self) -> None:
        for folder in list(self._children):
            self._end(folder)


@contextlib.contextmanager
def open_start_page(folder: Path) -> Iterator[Starlette]:
    hubs = RunHubs()
    try:
        yield StartPage(RunList(folder), hubs).app()
    finally:
        hubs.close()


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
            async with self._client:
                yield

        return Starlette(
            routes=[Route(path, telling(handler), methods=["GET"]) for path, handler in routes.items()],
            lifespan=lifespan,
        )

    async def index(self, request: Request) -> Response:
        return self._file(request, START)

    async def file(self, request: Request) -> Response:
        return self._file(request, request.path_params["name"])

    def _file(self, request: Request, name: str) -> Response:
        answer = self._files.answer(request, name)
        if answer is None:
            raise Unanswerable(404, "there is no such file")
        return answer

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
        try:
            url = self._hubs.url_of(self._runs.folder / name)
        except ConfigError as error:
            raise Unanswerable(404, str(error)) from None
        query = f"?{request.url.query}" if request.url.query else ""
        headers = {name: request.headers[name] for name in FORWARDED if name in request.headers}
        headers |= bearer_headers(observer_token())  # the guard in front has asked the browser for it
        try:
            asked = self._client.build_request("GET", f"{url}/{path}{query}", headers=headers)
            answer = await self._client.send(asked, stream=True)
        except httpx.TransportError as error:
            raise Unanswerable(502, f"the hub of {name} does not answer: {error!r}") from None
        kept = {key: value for key, value in answer.headers.items() if key not in NOT_RETURNED}
        return StreamingResponse(_body(answer), answer.status_code, kept)


def observer_token() -> str:
    """For reading only, from the token in the environment; "" where there is none."""
    secret = os.environ.get(HUB_TOKEN_VARIABLE, "").strip()
    return role_token(secret, "observer") if secret else ""


def _started_at(folder: Path) -> float:
    """By the time in its name; the settings of a run that was resumed are newer."""
    try:
        return time.mktime(time.strptime(folder.name[:15], "%Y%m%d-%H%M%S"))
    except ValueError:
        return (folder / CONFIG_FILE).stat().st_mtime


async def _body(answer: httpx.Response) -> AsyncIterator[bytes]:
    try:
        async for part in answer.aiter_raw():
            yield part
    finally:
        await answer.aclose()
