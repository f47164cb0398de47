"""Processes looked at from outside, and an engine that is asked how it is."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from treadle.dash.monitor import FIND_EVERY_S, EngineMonitor, ProcessTable
from treadle.dash.run_folder import RunFolder
from treadle.dash.status import EngineStatus


class HandClock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Engine:
    """A server with the one route that is asked for."""

    def __init__(self) -> None:
        self.info = {"update_count": 16, "is_paused": False}
        self.num_calls = 0
        engine = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                engine.num_calls += 1
                self.send_response(200 if self.path == "/bridge/info" else 404)
                self.end_headers()
                self.wfile.write(json.dumps(engine.info).encode())

            def log_message(self, *_: object) -> None: ...

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def engine() -> Iterator[Engine]:
    started = Engine()
    yield started
    started.server.shutdown()
    started.server.server_close()


def test_a_held_engine_is_shown_with_its_time_and_polled_once_a_second(engine: Engine):
    clock = HandClock()
    watch = EngineMonitor({"train": {"engine_url": engine.url}}, clock)
    assert watch.look() == EngineStatus(answers=True, version=16)
    engine.info["is_paused"] = True
    assert watch.look() == EngineStatus(answers=True, version=16)
    assert engine.num_calls == 1
    clock.now_s += 1
    assert watch.look() == EngineStatus(answers=True, version=16, paused_s=0.0)
    clock.now_s += 40
    assert watch.look() == EngineStatus(answers=True, version=16, paused_s=40.0)
    engine.info = {"update_count": 17, "is_paused": False}
    clock.now_s += 1
    assert watch.look() == EngineStatus(answers=True, version=17)


def test_a_dead_engine_is_shown_and_a_run_without_engine_has_none():
    assert EngineMonitor({"train": {"engine_url": "http://127.0.0.1:9"}}).look() == EngineStatus(answers=False)
    assert EngineMonitor({}).look() is None


@pytest.mark.parametrize(
    ("verb", "further", "own", "other"),
    [
        (["env", "echo", "serve"], [], "env-echo", "env-gsm8k"),
        (["train"], ["--trainer-rank", "1"], "trainer-1", "trainer"),
    ],
)
def test_each_of_several_environments_or_ranks_is_found(tmp_path: Path, verb, further, own, other):
    (tmp_path / "logs").mkdir()
    for name in (own, other):
        (tmp_path / "logs" / f"{name}.log").write_text("")
    words = ["treadle", *verb, "--config", str(tmp_path / "config.json"), *further]
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", *words])
    clock = HandClock()
    table = ProcessTable(RunFolder(tmp_path), clock)
    try:
        deadline = time.monotonic() + 20
        while (found := {one.name: one for one in table.look()})[own].state != "running":
            assert time.monotonic() < deadline
            clock.now_s += 10
            time.sleep(0.05)
        assert found[own].pid == child.pid
        assert found[other].state == "not running here"
    finally:
        child.kill()
        child.wait()


def test_a_process_is_found_by_its_command_line_until_it_ends(tmp_path: Path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "trainer.log").write_text("")
    (tmp_path / "logs" / "engine.log").write_text("")
    clock = HandClock()
    table = ProcessTable(RunFolder(tmp_path), clock)
    words = ["treadle", "train", "--config", str(tmp_path / "config.json")]
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", *words])
    try:
        deadline = time.monotonic() + 20
        while (trainer := {one.name: one for one in table.look()}["trainer"]).state != "running":
            assert time.monotonic() < deadline
            time.sleep(0.02)
            clock.now_s += FIND_EVERY_S
        assert trainer.pid == child.pid
        assert trainer.memory_bytes > 0
        assert {one.name: one.state for one in table.look()}["engine"] == "not running here"
    finally:
        child.kill()
        child.wait()
    assert {one.name: one.state for one in table.look()}["trainer"] == "ended"
