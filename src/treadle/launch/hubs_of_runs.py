"""Find the hub that serves the page of a run; for a finished run, start one while its page is open."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

from yarl import URL

from treadle.config.load import load_run, parse
from treadle.config.schema import HubConfig, RunConfig
from treadle.dash.run_folder import RunFolder
from treadle.dash.web import PageError
from treadle.errors import ConfigError
from treadle.formatting import near, program
from treadle.launch.folder import is_run_live
from treadle.launch.machine import port_of
from treadle.launch.process_plan import CONFIG_FILE
from treadle.net.access_tokens import HUB_TOKEN_VARIABLE, role_token
from treadle.net.address import HANDED_FD, is_loopback_host, take_port, url_to
from treadle.store.choice import RUN_FILE, queue_file

LOOPBACK = "127.0.0.1"
MAX_HUBS = 4  # open hubs of finished runs; the least recently used one is ended
IDLE_S = 30.0  # without a request or an open page, after which the hub of a finished run is ended
WATCH_S = 0.5  # shorter than the time in which a resumed run opens its queue
END_S = 2.0  # time to end before it is killed; it has nothing to save


def recorded_hub(folder: Path, config: RunConfig, port: int) -> HubConfig:
    """Settings of a hub that serves the recorded groups of a run, on loopback only."""
    database = queue_file(config.hub, folder)
    if config.is_supervised:  # it has no groups: an empty queue
        database = folder / RUN_FILE
    if database is None and not config.hub.store:
        raise ConfigError(
            f"the queue of this run is gone: {config.hub.database}; its page cannot be served",
            fix=f"{program()} report {near(folder)} writes what is left into one file",
        )
    own = {"host": LOOPBACK, "port": port, "run_folder": folder, "fresh": False, "validation_workers": 1}
    values = config.hub.model_dump() | own | ({} if database is None else {"database": database})
    return parse(HubConfig, values, source=str(folder / CONFIG_FILE))


def _has_own_hub(folder: Path) -> bool:
    """Whether a hub of the run itself serves its page now."""
    return is_run_live(folder) and not RunFolder(folder).is_supervised


@dataclass
class RunHub:
    """The server to which requests for a run are forwarded."""

    url: str
    token: str  # "" for none


@dataclass
class ChildHub(RunHub):
    """The hub of a finished run, started here."""

    process: subprocess.Popen[bytes]
    num_requests: int = 0  # in progress; an open page always has one, the event stream
    used_at: float = field(default_factory=time.monotonic)
    is_ending: bool = False

    def is_running(self) -> bool:
        return not self.is_ending and self.process.poll() is None


class RunHubs:
    """Finds the hub of each run; for a finished run, starts `treadle dash RUN` as a child process.

    A child locks the queue of its run, so it is ended when the run is resumed, or when no page of the run is open.
    """

    def __init__(self, idle_s: float = IDLE_S) -> None:
        self._idle_s = idle_s
        self._children: dict[Path, ChildHub] = {}
        self._changing = asyncio.Lock()  # while a child is started or ended

    @contextlib.asynccontextmanager
    async def use(self, folder: Path) -> AsyncIterator[RunHub]:
        """The hub of the run, which is not ended as idle meanwhile."""
        hub = await self._hub_of(folder)
        if not isinstance(hub, ChildHub):
            yield hub
            return
        hub.num_requests += 1
        try:
            yield hub
        finally:
            hub.num_requests -= 1
            hub.used_at = time.monotonic()

    async def watch(self) -> None:
        """Until cancelled, end children that are idle or whose run was resumed."""
        while True:
            await asyncio.sleep(WATCH_S)
            async with self._changing:
                for folder, child in list(self._children.items()):
                    is_idle = not child.num_requests and time.monotonic() - child.used_at > self._idle_s
                    if is_idle or not child.is_running() or _has_own_hub(folder):
                        await self._end(folder)

    def close(self) -> None:
        for child in self._children.values():
            child.process.terminate()
        for child in self._children.values():
            _end_process(child.process)

    async def _hub_of(self, folder: Path) -> RunHub:
        if _has_own_hub(folder):
            return _live_hub(folder, await asyncio.to_thread(load_run, folder / CONFIG_FILE))
        known = self._children.get(folder)
        if known is not None and known.is_running():
            return known
        async with self._changing:
            known = self._children.get(folder)
            if known is not None and known.is_running():  # another request has started it
                return known
            return await self._start(folder)

    async def _start(self, folder: Path) -> ChildHub:
        config = await asyncio.to_thread(load_run, folder / CONFIG_FILE)
        if config.hub_url:
            raise _not_forwarded(config)
        recorded_hub(folder, config, config.hub.port)  # raises if the child could not serve it
        await self._end(folder)
        while len(self._children) >= MAX_HUBS:
            unused = [place for place, child in self._children.items() if not child.num_requests]
            if not unused:
                raise PageError(503, f"the pages of {MAX_HUBS} finished runs are open: close a run, then reload this")
            await self._end(min(unused, key=lambda place: self._children[place].used_at))
        self._children[folder] = _start_child(folder)
        return self._children[folder]

    async def _end(self, folder: Path) -> None:
        child = self._children.get(folder)
        if child is not None:
            child.is_ending = True
            await asyncio.to_thread(_end_process, child.process)
            del self._children[folder]


def _start_child(folder: Path) -> ChildHub:
    with contextlib.closing(take_port(LOOPBACK, 0)) as listener:  # requests wait in its backlog until the child answers
        os.set_inheritable(listener.fileno(), True)
        process = subprocess.Popen(
            [sys.executable, "-m", "treadle", "dash", str(folder), "--no-open"],
            env=os.environ | {HANDED_FD: str(listener.fileno())},
            pass_fds=[listener.fileno()],
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C reaches only this process, which ends its children
        )
        return ChildHub(url_to(LOOPBACK, port_of(listener)), observer_token(), process)


def _end_process(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _live_hub(folder: Path, config: RunConfig) -> RunHub:
    """The hub of a run that is live on this machine.

    A run folder may be copied from elsewhere or belong to another user, and its config.json may name any address. So
    requests are forwarded to loopback only, and the token is sent only if this user owns the file.
    """
    origin = origin_of(config.train.hub_url)
    if not is_on_loopback(origin):
        raise _not_forwarded(config)
    is_own = (folder / CONFIG_FILE).stat().st_uid == os.getuid()
    return RunHub(origin, observer_token() if is_own else "")


def _not_forwarded(config: RunConfig) -> PageError:
    origin = origin_of(config.train.hub_url)
    page = f"open {origin}/dash/ in your browser" if origin else "its address is not the URL of a hub"
    return PageError(403, f"this run has its page at its own hub, which is not forwarded here: {page}")


def origin_of(url: str) -> str:
    """`http://HOST:PORT` without path, token or user, as aiohttp parses it; "" if it is not an HTTP URL."""
    try:
        parts = URL(url)
        return str(parts.origin()) if parts.scheme in ("http", "https") else ""
    except ValueError:
        return ""


def is_on_loopback(origin: str) -> bool:
    return is_loopback_host(URL(origin).host or "")


def observer_token() -> str:
    """A read-only token, derived from the token in the environment; "" without one."""
    secret = os.environ.get(HUB_TOKEN_VARIABLE, "").strip()
    return role_token(secret, "observer") if secret else ""
