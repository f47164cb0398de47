"""Run the router until SIGTERM, with the engines of the hub's table that serve.

    trainer ── verdicts ──> hub's table ── every 0.25 s ──> this process ── add, remove ──> smg <── requests

smg checks whether engines answer, not which weights they have. So it gets an engine only while the table says that it
serves, and another start at the same address is another engine. Without one smg answers 404 or 503.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterable, Sequence

import msgspec

from treadle.config.schema import RouterConfig
from treadle.errors import require
from treadle.log import get_logger
from treadle.net.access_tokens import HUB_TOKEN_VARIABLE, bearer_headers
from treadle.net.address import shown_url, take_port
from treadle.net.client import OK, BlockingHttpClient, NoAnswer
from treadle.router.smg import SmgProcess, Worker
from treadle.wire.bridge import TOKEN_VARIABLE
from treadle.wire.engines import EngineEntry, Engines

POLL_S = 0.25
HUB_TIMEOUT_S = 5.0
log = get_logger("router")


def to_remove(entries: Iterable[EngineEntry], workers: Iterable[Worker]) -> list[Worker]:
    """Workers that stand for engines which do not serve any more."""
    serving = {entry.engine_id for entry in entries if entry.state == "serving"}
    return [worker for worker in workers if worker.engine_id not in serving and not worker.is_leaving]


def to_add(entries: Iterable[EngineEntry], workers: Iterable[Worker]) -> list[EngineEntry]:
    """Engines that serve and are no workers. smg takes one at an address: the former must be gone."""
    taken = {worker.url for worker in workers}
    return [entry for entry in entries if entry.state == "serving" and entry.url not in taken]


class TableReader:
    """Reads the hub's table of engines."""

    def __init__(self, hub_url: str) -> None:
        headers = bearer_headers(os.environ.get(HUB_TOKEN_VARIABLE))
        self._hub = BlockingHttpClient(hub_url, headers=headers, timeout_s=HUB_TIMEOUT_S)
        self._shown_url = shown_url(hub_url)
        self._problem = ""

    def read(self) -> Sequence[EngineEntry] | None:
        """None while the hub does not answer: what it said last still holds."""
        try:
            answer = self._hub.request("GET", "/v1/engines")
            if answer.status == OK:
                self._problem = ""
                return msgspec.json.decode(answer.content, type=Engines).engines
            problem = f"status {answer.status}: {answer.message}"
        except (NoAnswer, msgspec.MsgspecError) as error:
            problem = str(error)
        if problem != self._problem:
            self._problem = problem
            log.warning("table_not_read", hub=self._shown_url, problem=problem)
        return None


def serve(config: RouterConfig) -> None:
    require("fleet", "smg")
    token = os.environ.get(TOKEN_VARIABLE, "")
    config.check_access(token)
    take_port(config.host, config.port).close()  # one in use is reported at once
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    table = TableReader(config.hub_url)
    with SmgProcess(config.host, config.port, token) as smg:
        log.info("listening", host=config.host, port=config.port)
        while not stop.wait(POLL_S):
            smg.keep_running()
            update_workers(smg, table)


def update_workers(smg: SmgProcess, table: TableReader) -> None:
    entries, workers = table.read(), smg.workers()
    if entries is None or workers is None:
        return
    for worker in to_remove(entries, workers):
        smg.remove(worker)
    for entry in to_add(entries, workers):
        smg.add(entry)
