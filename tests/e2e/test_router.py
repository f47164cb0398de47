"""A run whose requests go through smg: an engine is killed, which a foreign client does not notice, and one hangs."""

from __future__ import annotations

import importlib.util
import json
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil
import pytest

from tests.e2e.processes import end_of, environment, free_port
from tests.e2e.runs import command, newest_run
from tests.e2e.test_fleet import (
    OUTPUT,
    SETTINGS,
    Fleet,
    assert_all_sampled_from_proved_weights,
    assert_nothing_lost_or_doubled,
)
from tests.tiny_model import write_tiny_model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.full,  # tests/unit/router and tests/unit/envs/test_env_routed_fleet.py: decisions and checks
    pytest.mark.skipif(
        importlib.util.find_spec("smg") is None, reason="the extra fleet installs smg: scripts/setup.sh train,dev"
    ),
]


@dataclass
class ForeignClient:
    """Asks one chat completion after the other through the router."""

    url: str
    statuses: list[int] = field(default_factory=list)
    versions: list[list[int]] = field(default_factory=list)
    _ended: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> ForeignClient:
        self._model = httpx.get(f"{self.url}/v1/models", timeout=10).json()["data"][0]["id"]
        self._thread = threading.Thread(target=self._ask, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join(60)

    def _ask(self) -> None:
        while not self._ended.wait(0.1):
            body = {
                "model": self._model, "messages": [{"role": "user", "content": "Say 7"}], "max_tokens": 4,
                "logprobs": True, "return_token_ids": True,
            }  # fmt: skip
            answer = httpx.post(f"{self.url}/v1/chat/completions", json=body, timeout=60)
            self.statuses.append(answer.status_code)
            if answer.status_code == 200:
                choice = answer.json()["choices"][0]
                assert choice["token_ids"], "our fields pass"
                self.versions.append(choice["policy_versions"])


def test_engines_behind_the_router_die_and_hang_and_no_request_is_lost(tmp_path: Path) -> None:
    model, hub_port, router_port = write_tiny_model(tmp_path / "tiny"), free_port(), free_port()
    ports = ("--hub.port", str(hub_port), "--engine.port", str(free_port()), "--router.port", str(router_port))
    words = command(tmp_path / "runs", "--model", str(model), *SETTINGS, *ports, "--engines", "2", "--router", "smg")
    router_url = f"http://127.0.0.1:{router_port}"
    (tmp_path / "runs").mkdir()
    with (tmp_path / "runs" / OUTPUT).open("wb") as output:
        process = subprocess.Popen(words, stdout=output, stderr=output, env=environment())
    fleet = Fleet(f"http://127.0.0.1:{hub_port}", tmp_path / "runs", process)
    try:
        fleet.wait_until(lambda: len(fleet.serving) == 2, "two engines that serve")
        fleet.wait_until(lambda: is_ready(router_url), "router with an engine")
        with ForeignClient(router_url) as client:
            fleet.watch(2.0)
            fleet.kill_one()
            fleet.watch(2.0)
            fleet.wait_until(lambda: len(fleet.serving) == 2 and num_starts(fleet) == 3, "return of the engine")
            fleet.watch(2.0)
        with hanging(process.pid):
            fleet.wait_until(lambda: len(fleet.serving) == 1, "end of the wait for the engine that hangs")
            step = fleet.seen[-1][2]
            fleet.wait_until(lambda: fleet.seen[-1][2] >= step + 3, "steps without it")
        fleet.wait_until(lambda: len(fleet.serving) == 2, "return of the engine that hung")
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 130, end_of(tmp_path / "runs" / OUTPUT)
    finally:
        process.kill()
        process.wait()
    run = newest_run(fleet.folder)
    router_log = (run / "logs" / "router.log").read_text()
    print(f"{len(client.statuses)} foreign requests; (seconds, steps per second) by engines: {fleet.rates()}")
    assert set(client.statuses) == {200}
    assert len(client.statuses) >= 10
    assert json.loads((run / "config.json").read_text())["derived"]["openai"]["router_url"] == router_url
    added = re.findall(r"engine_added.* engine_id=(\w+)", router_log)
    assert len(set(added)) == 3
    assert len(added) >= 4, "the one that hung was removed"
    assert set(added) <= fleet.served, "only starts that had proved their weights"
    assert_nothing_lost_or_doubled(run)
    assert_all_sampled_from_proved_weights(run)


@contextmanager
def hanging(launcher_pid: int) -> Iterator[None]:
    """The last engine of the run is stopped meanwhile: its connections stay open."""
    children = psutil.Process(launcher_pid).children()
    engine = next(child for child in children if "engine-1" in child.cmdline())
    engine.suspend()
    try:
        yield
    finally:
        engine.resume()


def is_ready(router_url: str) -> bool:
    try:
        return httpx.get(f"{router_url}/readiness", timeout=10).status_code == 200
    except httpx.TransportError:
        time.sleep(0.2)
        return False


def num_starts(fleet: Fleet) -> int:
    """Starts of engines that have served: their ids have 16 characters."""
    return len({name for name in fleet.served if len(name) == 16})
