"""The hub as users run it: a separate process that is killed and started again."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.hub_process import HubProcess


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubProcess]:
    started = HubProcess(tmp_path)
    yield started
    started.end()


def group(tag: int, env_id: int | None = 0) -> dict[str, Any]:
    return {"tokens": [[tag, 2]] * 2, "masks": [[-100, 2]] * 2, "scores": [0.0, 1.0], "env_id": env_id}


def register(client: httpx.Client, starting_step: int = 0) -> None:
    body = {
        "wandb_group": "g", "wandb_project": "p", "batch_size": 4, "max_token_len": 128,
        "checkpoint_dir": "c", "save_checkpoint_interval": 5, "starting_step": starting_step, "num_steps": 10,
    }  # fmt: skip
    assert client.post("/register", json=body).status_code == 200


def test_kill_9_loses_no_answered_group_and_the_restart_is_quick(hub: HubProcess):
    """Eight clients post until the hub is shot in mid-work. All that it answered must be there after."""
    hub.start()
    first_cpu_s = hub.cpu_s
    accepted: list[int] = []

    def post_until_shot(worker: int) -> None:
        with httpx.Client(base_url=hub.url, timeout=10.0) as client:
            for tag in range(worker * 10_000, worker * 10_000 + 1000):
                key = {"Idempotency-Key": f"k{tag}"}
                try:
                    answer = client.post("/scored_data", json=group(tag), headers=key)
                except httpx.TransportError:
                    return
                assert answer.status_code == 200
                accepted.append(tag)

    with httpx.Client(base_url=hub.url, timeout=10.0) as client:
        register(client, starting_step=7)
        client.post("/scored_data_list", json=[group(900_001, None), group(900_002, None)])
        batch = client.post("/v1/lease", json={"step": 8, "holder": "t"}).json()["batch"]
        assert client.post("/v1/batches/8/ack", json={"token": batch["token"]}).status_code == 200
        env = {"max_token_length": 9, "desired_name": "math", "weight": 1.0, "group_size": 2}
        assert client.post("/register-env", json=env).json()["env_id"] == 0
    with ThreadPoolExecutor(8) as pool:
        workers = [pool.submit(post_until_shot, worker) for worker in range(8)]
        deadline = time.monotonic() + 20
        while len(accepted) < 100 and time.monotonic() < deadline:
            time.sleep(0.01)
        hub.end()
        for worker in workers:
            worker.result()
    assert len(accepted) >= 100

    hub.start()
    assert hub.cpu_s - first_cpu_s < 1.0

    with httpx.Client(base_url=hub.url, timeout=10.0) as client:
        status = client.get("/v1/status").json()
        assert status["step"] == 8
        assert status["trained_groups"] == 2
        assert status["queued_groups"] >= len(accepted)
        assert status["envs"][0]["groups_accepted"] == status["queued_groups"]
        again = client.post("/v1/lease", json={"step": 8, "holder": "t"}).json()["batch"]
        assert again["groups"] == batch["groups"]
        for tag in accepted[-20:]:
            answer = client.post("/scored_data", json=group(tag), headers={"Idempotency-Key": f"k{tag}"})
            assert answer.json() == {"status": "duplicate"}
        stored = set()
        while taken := client.get("/batch").json()["batch"]:
            stored |= {each["tokens"][0][0] for each in taken}
        left = client.get("/status").json()["queue_size"]
    assert len(set(accepted) - stored) <= left < 2  # what fills no whole batch is still in the queue


def test_a_stopped_hub_gives_no_held_batch_away_and_loses_nothing(tmp_path: Path):
    """Stopped (SIGSTOP) for longer than a lease: nobody could renew one meanwhile."""
    lease_s = 4.0
    with (
        HubProcess(tmp_path, "--lease-s", str(lease_s)) as hub,
        httpx.Client(base_url=hub.url, timeout=60.0) as client,
        ThreadPoolExecutor(1) as pool,
    ):
        register(client)
        client.post("/scored_data_list", json=[group(tag, None) for tag in range(2)])
        batch = client.post("/v1/lease", json={"step": 1, "holder": "first"}).json()["batch"]
        hub.send(signal.SIGSTOP)
        key = {"Idempotency-Key": "posted to a stopped hub"}
        posting = pool.submit(httpx.post, f"{hub.url}/scored_data", json=group(2, None), headers=key, timeout=60.0)
        time.sleep(lease_s + 1.0)
        hub.send(signal.SIGCONT)
        other = client.post("/v1/lease", json={"step": 1, "holder": "second"})
        assert (other.status_code, posting.result().status_code) == (409, 200), other.text
        again = client.post("/scored_data", json=group(2, None), headers=key)
        assert again.json() == {"status": "duplicate"}
        for verb in ("renew", "ack"):
            assert client.post(f"/v1/batches/1/{verb}", json={"token": batch["token"]}).status_code == 200
        status = client.get("/v1/status").json()
        assert (status["step"], status["trained_groups"], status["queued_groups"]) == (1, 2, 1)


def test_a_lease_of_an_idle_hub_runs_out(tmp_path: Path):
    with HubProcess(tmp_path, "--lease-s", "1.5") as hub, httpx.Client(base_url=hub.url, timeout=60.0) as client:
        register(client)
        client.post("/scored_data_list", json=[group(tag, None) for tag in range(2)])
        client.post("/v1/lease", json={"step": 1, "holder": "first"})
        time.sleep(3.5)  # nobody calls, and only the clock itself moves
        assert client.post("/v1/lease", json={"step": 1, "holder": "second"}).status_code == 200


def test_sigterm_answers_who_waits_and_ends_with_code_0_in_time(hub: HubProcess):
    took_s: list[float] = []
    while len(took_s) < 3 and min(took_s, default=2.0) >= 2.0:  # other processes may keep the machine busy
        hub.start()
        with httpx.Client(base_url=hub.url, timeout=60.0) as client, ThreadPoolExecutor(1) as pool:
            register(client)
            body = {"step": 1, "holder": "t", "wait_s": 60}
            waiting = pool.submit(client.post, "/v1/lease", json=body)
            time.sleep(0.3)
            code, seconds = hub.stop()
            assert waiting.result().json()["batch"] is None
        assert code == 0
        assert not Path(f"{hub.database}-wal").exists()
        took_s.append(seconds)
    assert min(took_s) < 2.0, took_s


def test_answers_are_not_held_back_by_the_network_stack(hub: HubProcess):
    """A socket without TCP_NODELAY adds 40 ms to every call."""
    hub.start()
    with httpx.Client(base_url=hub.url, timeout=10.0) as client:
        seconds = []
        for _ in range(20):
            began = time.monotonic()
            client.get("/healthz")
            seconds.append(time.monotonic() - began)
    assert min(seconds) < 0.03


def test_a_port_in_use_is_named_with_exit_code_2(hub: HubProcess):
    hub.start()
    command = [sys.executable, "-m", "treadle", "hub", "--port", str(hub.port), "--database", "other.sqlite"]
    second = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False, cwd=hub.database.parent)
    assert second.returncode == 2
    assert f"port {hub.port} on 127.0.0.1 is in use" in second.stderr
    assert "--port" in second.stderr
    assert not (hub.database.parent / "other.sqlite").exists()


def test_the_hub_listens_on_loopback_only_and_loads_no_torch(hub: HubProcess):
    hub.start()
    listening = Path("/proc/net/tcp").read_text().splitlines()
    port = f":{hub.port:04X}"
    assert [line.split()[1] for line in listening if port in line.split()[1] and line.split()[3] == "0A"] == [
        f"0100007F{port}"
    ]
    code = "import sys, treadle.hub; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
