"""Large bodies do not delay other requests. `./check` runs this alone: beside other tests it would measure them."""

from __future__ import annotations

import statistics
import threading
import time
from pathlib import Path

import httpx
import pytest

from tests.contract.atropos_calls import JSON, TRAINER, sized
from tests.hub_process import HubProcess


def test_others_are_answered_while_60_megabytes_are_posted(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory):
    """Original: 3.1 s in which nobody else is answered (S9). Three tries: other processes may keep the machine busy, so
    a hub without work answers at the same time."""
    late_s = []
    with HubProcess(tmp_path) as hub, HubProcess(tmp_path_factory.mktemp("idle")) as idle:
        assert httpx.post(f"{hub.url}/register", json=TRAINER | {"max_token_len": 0}).status_code == 200
        _status_times_during(hub, idle, sized(2**20))  # code that is loaded once must not count later
        while len(late_s) < 3 and min(late_s, default=1.0) >= 0.1:
            asked, beside = _status_times_during(hub, idle, sized(60 * 10**6))
            p99_s, idle_p99_s = (statistics.quantiles(seconds, n=100)[98] for seconds in (asked, beside))
            late_s.append(p99_s - idle_p99_s)
            print(
                f"{len(asked)} calls of /status, p99 {p99_s * 1000:.0f} ms, of an idle hub {idle_p99_s * 1000:.0f} ms"
            )
    assert min(late_s) < 0.1


def _status_times_during(hub: HubProcess, idle: HubProcess, body: bytes) -> tuple[list[float], list[float]]:
    answers: list[int] = []

    def post() -> None:
        with httpx.Client(base_url=hub.url, timeout=60.0) as poster:
            answers.append(poster.post("/scored_data", content=body, headers=JSON).status_code)

    def seconds_of_status(of: httpx.Client) -> float:
        began = time.monotonic()
        assert of.get("/status").status_code == 200
        return time.monotonic() - began

    asked, beside = [], []
    with (
        httpx.Client(base_url=hub.url, timeout=60.0) as client,
        httpx.Client(base_url=idle.url, timeout=60.0) as idle_client,
    ):
        seconds_of_status(client)
        seconds_of_status(idle_client)
        posting = threading.Thread(target=post)
        posting.start()
        while posting.is_alive():
            asked.append(seconds_of_status(client))
            beside.append(seconds_of_status(idle_client))
            time.sleep(0.005)
        client.get("/reset_data")
    assert answers == [200]
    return asked, beside
