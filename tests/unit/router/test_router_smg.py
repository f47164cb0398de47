"""smg itself, with small servers in place of engines: routing keys, the key for workers, and a restart."""

from __future__ import annotations

import importlib.util
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest

from tests.e2e.processes import free_port
from treadle.net.access_tokens import bearer_headers
from treadle.router.process import update_workers
from treadle.router.smg import SmgProcess
from treadle.wire.engines import EngineEntry

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("smg") is None, reason="the extra fleet installs smg: scripts/setup.sh train,dev"
)
READY_S = 12.0


class SmallServer(ThreadingHTTPServer):
    """Answers what smg asks an engine, and counts requests by their prompt."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.asked: list[str] = []


class _Handler(BaseHTTPRequestHandler):
    server: SmallServer

    def do_GET(self) -> None:
        self._answer({"model_path": "m", "served_model_name": "m", "data": [{"id": "m"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append(body["text"])
        self._answer({"text": "", "meta_info": {}})

    def _answer(self, body: object) -> None:
        content = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def small_server() -> Iterator[SmallServer]:
    with SmallServer() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


class Router:
    """smg with a table of engines, as `treadle router` runs it."""

    def __init__(self, smg: SmgProcess, url: str, engines: list[SmallServer]) -> None:
        self.smg, self.url, self._engines = smg, url, engines

    def read(self) -> list[EngineEntry]:
        return [
            EngineEntry(engine_id=f"e{place}", name="", url=engine.url, state="serving")
            for place, engine in enumerate(self._engines)
        ]

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + READY_S
        while not condition():
            assert time.monotonic() < deadline
            self.smg.keep_running()
            update_workers(self.smg, self)  # type: ignore[arg-type]
            time.sleep(0.05)

    def has_all(self) -> bool:
        workers = self.smg.workers() or []
        return len(workers) == len(self._engines) and all(worker.status == "ready" for worker in workers)

    def generate(self, text: str, key: str, token: str = "") -> httpx.Response:
        headers = {"X-SMG-Routing-Key": key, **bearer_headers(token or None)}
        return httpx.post(f"{self.url}/generate", json={"text": text}, headers=headers, timeout=10)


@contextmanager
def router(num_engines: int, token: str = "") -> Iterator[tuple[Router, list[SmallServer]]]:
    with ExitStack() as stack:
        engines = [stack.enter_context(small_server()) for _ in range(num_engines)]
        port = free_port()
        smg = stack.enter_context(SmgProcess("127.0.0.1", port, token))
        running = Router(smg, f"http://127.0.0.1:{port}", engines)
        running.until(running.has_all)
        yield running, engines


def test_requests_with_one_routing_key_reach_one_engine() -> None:
    with router(2) as (running, engines):

        def engine_of(prompt: int, key: int) -> int:
            """The engine that got a long prompt, by the key of a rollout."""
            before = [len(engine.asked) for engine in engines]
            answer = running.generate(f"{prompt} is the number of this prompt. " * 40, f"rollout-{key}")
            assert answer.status_code == 200, answer.text
            (place,) = [place for place, engine in enumerate(engines) if len(engine.asked) > before[place]]
            return place

        first = [engine_of(prompt=key, key=key) for key in range(16)]
        assert set(first) == {0, 1}
        elsewhere = [first.index(1 - place) for place in first]  # a prompt that the other engine has in its cache
        assert [engine_of(prompt, key) for key, prompt in enumerate(elsewhere)] == first


@pytest.mark.parametrize("token", ["", "of-clients"])
def test_nobody_else_can_add_or_remove_an_engine(token: str) -> None:
    with router(1, token) as (running, _), small_server() as other:
        (worker,) = running.smg.workers() or []
        for sent in ({}, bearer_headers(token or "guessed")):
            added = httpx.post(f"{running.url}/workers", json={"url": other.url}, headers=sent, timeout=10)
            removed = httpx.delete(f"{running.url}/workers/{worker.id}", headers=sent, timeout=10)
            assert {added.status_code, removed.status_code} <= {401, 403}
        assert [left.url for left in running.smg.workers() or []] == [worker.url]
        assert running.generate("with the token", "a", token).status_code == 200
        assert running.generate("without it", "a").status_code == (401 if token else 200)


def test_smg_that_is_killed_starts_again_with_its_engines() -> None:
    with router(2) as (running, _):
        running.smg._process.kill()
        running.smg._process.wait()
        assert running.smg.workers() is None
        running.until(running.has_all)
        assert running.generate("after the restart", "a").status_code == 200
