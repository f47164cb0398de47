"""Start smg as a child process, and add and remove its workers over its API.

`python -m treadle.router.smg` is the child: it reads SmgSettings from standard input, because other users can read
command lines, and runs smg's server.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from contextlib import AbstractContextManager
from typing import Any

import msgspec

from treadle.background import PARENT_VARIABLE, end_with_parent
from treadle.errors import ProcessDied
from treadle.log import get_logger
from treadle.net.access_tokens import bearer_headers
from treadle.net.address import take_port, url_to
from treadle.net.client import OK, BlockingHttpClient, HttpAnswer, NoAnswer
from treadle.wire.engines import EngineEntry

ID_LABEL = "engine_id"  # label of a worker: the start of the engine that it stands for
CALL_S = 5.0
LONGEST_REQUEST_S = 24 * 3600  # environments have time limits of their own
log = get_logger("router")


class SmgSettings(msgspec.Struct, frozen=True, kw_only=True):
    host: str
    port: int
    metrics_port: int
    admin_key: str  # adds and removes workers
    client_key: str = ""  # that clients must send; "": none


class Worker(msgspec.Struct, frozen=True, kw_only=True):
    """An engine, as smg lists it."""

    id: str
    url: str
    status: str = ""
    labels: dict[str, str] = {}

    @property
    def engine_id(self) -> str:
        return self.labels.get(ID_LABEL, "")

    @property
    def is_leaving(self) -> bool:
        """It was removed: it gets no further request, and is listed for some seconds."""
        return self.status == "draining"


class _Workers(msgspec.Struct):
    workers: list[Worker]


class SmgProcess(AbstractContextManager["SmgProcess"]):
    """smg, which is started again if it ends."""

    def __init__(self, host: str, port: int, client_key: str) -> None:
        """`client_key`: the token of its clients, which it also sends to engines; "": none."""
        self._client_key = client_key
        with take_port("127.0.0.1", 0) as free:
            metrics_port = int(free.getsockname()[1])
        admin_key = secrets.token_urlsafe(32)
        self._settings = SmgSettings(
            host=host, port=port, metrics_port=metrics_port, admin_key=admin_key, client_key=client_key
        )
        headers = {"Content-Type": "application/json", **bearer_headers(admin_key)}
        self._api = BlockingHttpClient(url_to(host, port), headers=headers, timeout_s=CALL_S)
        self._has_served = False
        self._process = self._start()

    def __exit__(self, *_: object) -> None:
        self._process.kill()  # environments have ended; a clean end would wait for requests
        self._process.wait()

    def _start(self) -> subprocess.Popen[bytes]:
        environment = {**os.environ, PARENT_VARIABLE: str(os.getpid())}
        process = subprocess.Popen([sys.executable, "-m", "treadle.router.smg"], stdin=subprocess.PIPE, env=environment)
        assert process.stdin is not None  # noqa: S101 - it is a pipe
        with process.stdin as pipe:
            pipe.write(msgspec.json.encode(self._settings))
        return process

    def keep_running(self) -> None:
        """Start it again if it has ended; raises ProcessDied if it has never served."""
        code = self._process.poll()
        if code is None:
            return
        if not self._has_served:
            raise ProcessDied(f"smg ended with exit code {code} before it served", fix="its messages are above")
        log.warning("smg_starts_again", exit_code=code)
        self._has_served = False
        self._process = self._start()

    def workers(self) -> list[Worker] | None:
        """None while it does not answer."""
        answer = self._call("GET", "/workers")
        if answer is None or answer.status != OK:
            return None
        self._has_served = True
        return msgspec.json.decode(answer.content, type=_Workers).workers

    def add(self, entry: EngineEntry) -> None:
        body: dict[str, Any] = {"url": entry.url, "labels": {ID_LABEL: entry.engine_id}}
        if self._client_key:
            body["api_key"] = self._client_key
        answer = self._call("POST", "/workers", msgspec.json.encode(body))
        if answer is not None and answer.status < 300:
            log.info("engine_added", engine=entry.url, engine_id=entry.engine_id, version=entry.proved_version)

    def remove(self, worker: Worker) -> None:
        answer = self._call("DELETE", f"/workers/{worker.id}")
        if answer is not None and answer.status < 300:
            log.warning("engine_removed", engine=worker.url, engine_id=worker.engine_id)

    def _call(self, method: str, path: str, body: bytes | None = None) -> HttpAnswer | None:
        try:
            return self._api.request(method, path, body=body)
        except NoAnswer:
            return None


def main() -> None:
    settings = msgspec.json.decode(sys.stdin.buffer.read(), type=SmgSettings)
    end_with_parent()
    from smg.launch_router import launch_router
    from smg.router_args import RouterArgs

    launch_router(
        RouterArgs(
            host=settings.host,
            port=settings.port,
            prometheus_host="127.0.0.1",
            prometheus_port=settings.metrics_port,
            policy="cache_aware",  # the engine with the longest known prefix, unless it has much more to do
            balance_abs_threshold=2,
            routing_key_override=True,  # X-SMG-Routing-Key: all turns of a rollout at one engine
            api_key=settings.client_key or None,
            control_plane_api_keys=[("treadle", "treadle", settings.admin_key, "admin")],
            worker_startup_check_interval=1,
            worker_startup_timeout_secs=10,
            request_timeout_secs=LONGEST_REQUEST_S,
            max_concurrent_requests=0,  # no limit; an engine queues requests itself
            disable_load_monitoring=True,
            disable_tokenizer_autoload=True,
            history_backend="none",
            log_level="warn",
        )
    )


if __name__ == "__main__":
    main()
