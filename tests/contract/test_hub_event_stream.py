"""GET /v1/events over a real socket: cut off, killed, stopped, not read."""

from __future__ import annotations

import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.hub_process import HubProcess
from treadle.store import SqliteStore, runs
from treadle.wire.hub import RegisterEnv

SLOW_S = 60.0  # how long anything may take on a loaded machine


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubProcess]:
    with HubProcess(tmp_path, "--read-timeout-s", "1") as started:
        yield started


def group(tag: int) -> dict[str, Any]:
    return {"tokens": [[tag, 2]] * 2, "masks": [[-100, 2]] * 2, "scores": [0.0, 1.0]}


class Follower(threading.Thread):
    """Reads on and on: when it is cut off it comes back with the last id it saw, as an EventSource does."""

    def __init__(self, url: str, last_id: str | None = "0") -> None:
        super().__init__(daemon=True)
        self._url = url
        self._last_id = last_id
        self.is_connected = threading.Event()
        self.is_enough = threading.Event()
        self.events: list[tuple[str, int | None, dict[str, Any]]] = []
        self.num_connections = 0
        self.ends: list[str] = []

    def run(self) -> None:
        while not self.is_enough.is_set():
            try:
                self._read()
                self.ends.append("the hub ended it")
            except httpx.HTTPError as error:
                self.ends.append(type(error).__name__)
            time.sleep(0.05)

    def _read(self) -> None:
        headers = {"Last-Event-ID": self._last_id} if self._last_id is not None else {}
        with httpx.stream("GET", f"{self._url}/v1/events", headers=headers, timeout=SLOW_S) as answer:
            assert answer.status_code == 200
            assert answer.headers["content-type"].startswith("text/event-stream")
            self.num_connections += 1
            self.is_connected.set()
            fields: dict[str, str] = {}
            for line in answer.iter_lines():
                name, _, value = line.partition(": ")
                fields[name] = value
                if line:
                    continue
                if "data" in fields:
                    self._last_id = fields.get("id", self._last_id)
                    number = int(fields["id"]) if "id" in fields else None
                    self.events.append((fields["event"], number, json.loads(fields["data"])))
                fields = {}
                if self.is_enough.is_set():
                    return

    def wait_for(self, last: int) -> list[int | None]:
        deadline = time.monotonic() + SLOW_S
        while time.monotonic() < deadline and (not self.events or self.events[-1][1] != last):
            time.sleep(0.01)
        return [number for _, number, _ in self.events]


def test_kill_9_makes_a_reader_miss_nothing_and_read_nothing_twice(hub: HubProcess):
    follower = Follower(hub.url)
    follower.start()
    answered = 0
    is_shot = threading.Event()

    def post() -> None:
        nonlocal answered
        with httpx.Client(base_url=hub.url, timeout=SLOW_S) as client:
            while not is_shot.is_set():
                try:
                    assert client.post("/scored_data", json=group(answered)).status_code == 200
                except httpx.TransportError:
                    return
                answered += 1

    for shot in range(1, 4):
        is_shot.clear()
        poster = threading.Thread(target=post)
        poster.start()
        while answered < 60 * shot:
            time.sleep(0.005)
        hub.end()
        is_shot.set()
        poster.join()
        hub.start()
    last = _newest(hub)
    assert follower.wait_for(last) == list(range(1, last + 1))
    follower.is_enough.set()
    assert follower.num_connections >= 4
    num_accepted = sum(event["data"]["groups"] for kind, _, event in follower.events if kind == "accepted")
    assert num_accepted == httpx.get(f"{hub.url}/v1/status").json()["accepted_groups"] >= answered


def _newest(hub: HubProcess) -> int:
    """The id of an event that is made now."""
    with httpx.stream("GET", f"{hub.url}/v1/events", timeout=SLOW_S) as answer:
        lines = answer.iter_lines()
        assert next(lines) == "retry: 1000"
        assert httpx.post(f"{hub.url}/scored_data", json=group(1)).status_code == 200
        return next(int(line.removeprefix("id: ")) for line in lines if line.startswith("id: "))


def test_every_change_of_a_batch_is_sent_as_an_event(hub: HubProcess):
    follower = Follower(hub.url, last_id=None)
    follower.start()
    follower.is_connected.wait(SLOW_S)
    with httpx.Client(base_url=hub.url, timeout=SLOW_S) as client:
        trainer = {
            "wandb_group": "g", "wandb_project": "p", "batch_size": 4, "max_token_len": 128,
            "checkpoint_dir": "c", "save_checkpoint_interval": 5, "starting_step": 0, "num_steps": 10,
        }  # fmt: skip
        client.post("/register", json=trainer)
        client.post("/scored_data_list", json=[group(1), group(2)])
        batch = client.post("/v1/lease", json={"step": 1, "holder": "t"}).json()["batch"]
        client.post("/v1/batches/1/ack", json={"token": batch["token"]})
    follower.wait_for(5)
    kinds = [kind for kind, _, _ in follower.events]
    assert kinds == ["trainer_registered", "accepted", "formed", "leased", "trained"]


def test_a_waiting_stream_ends_cleanly_when_the_hub_stops(hub: HubProcess):
    took_s: list[float] = []
    while len(took_s) < 3 and min(took_s, default=2.0) >= 2.0:  # other processes may keep the machine busy
        if took_s:
            hub.start()
        follower = Follower(hub.url)
        follower.start()
        assert follower.is_connected.wait(SLOW_S)
        time.sleep(0.2)
        exit_code, seconds = hub.stop()
        follower.is_enough.set()
        follower.join(SLOW_S)
        assert exit_code == 0, hub.log
        assert follower.ends[0] == "the hub ended it"
        took_s.append(seconds)
    assert min(took_s) < 2.0, took_s


def test_silence_is_no_reason_to_cut_a_stream(hub: HubProcess):
    """Neither the limit on reading (a second here) nor that on writing is meant for it."""
    follower = Follower(hub.url)
    follower.start()
    assert follower.is_connected.wait(SLOW_S)
    time.sleep(4.0)
    httpx.post(f"{hub.url}/scored_data", json=group(1))
    assert follower.wait_for(1) == [1]
    assert follower.num_connections == 1
    follower.is_enough.set()


def test_a_reader_that_goes_is_noticed(hub: HubProcess):
    with httpx.stream("GET", f"{hub.url}/v1/events", timeout=SLOW_S) as answer:
        chunks = answer.iter_raw()
        assert next(chunks) == b"retry: 1000\n\n"
        assert _num_readers(hub) == 1
    deadline = time.monotonic() + SLOW_S
    while _num_readers(hub) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert _num_readers(hub) == 0


def _num_readers(hub: HubProcess) -> int:
    found = re.search(
        r"^treadle_hub_event_readers (\d+)$", httpx.get(f"{hub.url}/metrics", timeout=SLOW_S).text, re.MULTILINE
    )
    assert found is not None
    return int(found[1])


def test_readers_that_do_not_read_cost_no_memory(tmp_path: Path):
    hub = HubProcess(tmp_path)
    env = RegisterEnv(max_token_length=9, desired_name="a" * 250, weight=1.0, group_size=2)
    with SqliteStore.open(hub.database) as store:
        made = [
            store.write(runs.register_env, env, resume=True, idle_s=lambda _: 0.0, gone_after_s=9.0)
            for _ in range(6_000)
        ]
        made[-1].result(timeout=120)
    with hub:
        assert hub.process is not None
        process = psutil.Process(hub.process.pid)
        httpx.get(f"{hub.url}/metrics", timeout=SLOW_S)
        before = process.memory_info().rss
        deaf = []
        for _ in range(20):
            line = socket.create_connection(("127.0.0.1", hub.port))
            line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            line.sendall(b"GET /v1/events?after=0 HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            deaf.append(line)
        deadline = time.monotonic() + SLOW_S
        while _num_readers(hub) < 20 and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(1.0)
        grown = process.memory_info().rss - before
        assert _num_readers(hub) == 20
        for line in deaf:
            line.close()
    assert grown < 20e6  # all that there is to tell is 20 times 2.5 MB
