"""The hub matches its /openapi.json: schemathesis generates valid and invalid requests from it.

Three phases each: values at the limits of every field, random ones, and calls that follow the links of the description
(register an environment, ask for its status; lease a batch, renew, acknowledge it or give it back).
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import schemathesis

import tests.contract.schemathesis_hooks  # noqa: F401 - our binary form
from tests.hub_process import HubProcess
from treadle.hub.state import MAX_DELIVERIES
from treadle.wire.groups import BINARY_TYPE, ScoredGroup, join_groups, pack_group

HERE = Path(__file__).parent
TRAINER = {
    "wandb_group": "g", "wandb_project": "p", "batch_size": 4, "max_token_len": 128,
    "checkpoint_dir": "c", "save_checkpoint_interval": 5, "starting_step": 0, "num_steps": 10,
}  # fmt: skip
ENV = {"max_token_length": 9, "desired_name": "math", "weight": 1.0, "group_size": 2}
GROUP = {"tokens": [[1, 2]] * 2, "masks": [[-100, 2]] * 2, "scores": [0.0, 1.0]}
LARGE = {"tokens": [[1, 2]] * 4, "masks": [[-100, 2]] * 4, "scores": [0.0, 1.0, 0.5, 0.0]}
TOKEN = "a-token-of-the-tests-0123456789"  # noqa: S105


def tried(hub: HubProcess, *flags: str, max_examples: int) -> int:
    """Number of requests that were made from the description; fails when an answer was not as described."""
    command = [
        sys.executable, "-m", "schemathesis.cli", "--config-file", str(HERE / "schemathesis.toml"),
        "run", f"{hub.url}/openapi.json", "--no-color", "--continue-on-failure", "--generation-database", "none",
        "--seed", os.environ.get("TREADLE_FUZZ_SEED", "1"), "--max-examples", str(max_examples),
        "--exclude-path", "/v1/events",  # it never ends: test_hub_event_stream.py reads it
        *flags,
    ]  # fmt: skip
    hooks = {"SCHEMATHESIS_HOOKS": "tests.contract.schemathesis_hooks", "PYTHONPATH": str(HERE.parents[1])}
    began = time.monotonic()
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
        env=os.environ | hooks,
    )
    seconds = time.monotonic() - began
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    found = re.search(r"(\d+) generated", done.stdout)
    assert found is not None, done.stdout[-2000:]
    print(f"{found[1]} requests in {seconds:.0f} s")
    return int(found[1])


def begin_a_run(url: str, headers: dict[str, str]) -> None:
    """A trainer, an environment and groups, so that there is something to find."""
    with httpx.Client(base_url=url, headers=headers) as client:
        assert client.post("/register", json=TRAINER).status_code == 200
        client.post("/v1/lease", json={"step": 1, "holder": "t"})
        assert client.post("/register-env", json=ENV).json()["env_id"] == 0
        assert client.post("/scored_data_list", json=[GROUP | {"env_id": 0}] * 40).status_code == 200


def test_every_route_of_a_real_run_answers_as_described(tmp_path: Path):
    """A run by the book, each answer checked: register, post, lease, hold, acknowledge, give back, look, reset."""
    with HubProcess(tmp_path) as hub:
        api = schemathesis.openapi.from_url(f"{hub.url}/openapi.json")
        called: set[tuple[str, str]] = set()

        def call(method: str, path: str, *, step: int | None = None, env_id: int | None = None, **parts: Any) -> Any:
            named = {"step": step, "env_id": env_id}
            parts["path_parameters"] = {name: value for name, value in named.items() if value is not None}
            if "body" in parts:
                parts.setdefault("media_type", "application/json")
            answer = api[path][method].Case(**parts).call_and_validate()
            assert answer.status_code == 200, answer.text
            called.add((method, path))
            return answer.json() if "application/json" in answer.headers["content-type"] else answer.content

        looks = [
            path
            for path, methods in api.raw_schema["paths"].items()
            if "get" in methods and path not in ("/v1/events", "/status-env", "/reset_data", "/v1/envs/{env_id}")
        ]
        for path in looks:  # before anything is there
            call("GET", path)
        call("POST", "/register", body=TRAINER)
        call("POST", "/register-env", body=ENV)
        call("POST", "/v1/lease", body={"step": 1, "holder": "t"})
        assert call("POST", "/register-env", body=ENV)["env_id"] == 0
        assert call("GET", "/status-env", query={"env_id": 0})["queue_size"] == 0
        assert call("GET", "/v1/envs/{env_id}", env_id=0)["trainer_waits"]
        assert call("POST", "/scored_data", body=GROUP | {"env_id": 0})["status"] == "received"
        assert call("POST", "/scored_data", body=LARGE | {"env_id": 0})["status"] == "buffered"
        assert call("POST", "/scored_data_list", body=[LARGE | {"env_id": 0}] * 5)["buffered"] == 5
        packed = join_groups([pack_group(msgspec.convert(GROUP, ScoredGroup))] * 3)
        key = {"Idempotency-Key": "k"}
        for status in ("received", "duplicate"):
            part = {"body": packed, "media_type": BINARY_TYPE, "headers": key}
            assert call("POST", "/v1/groups", **part)["status"] == status
        for step, last in ((1, "ack"), *[(2, "nack")] * MAX_DELIVERIES):
            batch = call("POST", "/v1/lease", body={"step": step, "holder": "t"})["batch"]
            assert batch["groups"]
            for verb in ("renew", last):
                call("POST", f"/v1/batches/{{step}}/{verb}", step=step, body={"token": batch["token"]})
        assert call("GET", "/v1/dead-letters")["dead_letters"]
        assert call("GET", "/batch")["batch"]
        for path in looks:
            call("GET", path)
        report = {"kind": "env", "name": "env math", "machine": "m", "pid": 7, "waits": [{"what": "x", "seconds": 1.0}]}
        assert call("POST", "/v1/reports", body=report) == {"dump": ""}
        assert len(call("GET", "/v1/processes")["processes"]) == 2
        assert call("POST", "/v1/engines/verdicts", body={"engines": []})["engines"] == []
        assert call("POST", "/disconnect-env", body={"env_id": 0})["status"] == "success"
        assert call("POST", "/disconnect-env", body={"env_id": 9})["status"] == "failure"
        call("POST", "/v1/reset")
        call("GET", "/reset_data")
        described = {(method.upper(), path) for path, methods in api.raw_schema["paths"].items() for method in methods}
        assert described - called == {("GET", "/v1/events")}


@pytest.mark.slow
def test_an_open_hub_is_what_it_says_it_is(tmp_path: Path):
    with HubProcess(tmp_path) as hub:
        begin_a_run(hub.url, {})
        num_cases = tried(hub, "--exclude-path", "/reset_data", "--exclude-path", "/v1/reset", max_examples=10)
        assert num_cases > 400
        assert_well(hub)


@pytest.mark.slow
def test_a_hub_with_a_token_matches_its_schema_and_refuses_other_calls(tmp_path: Path):
    with HubProcess(tmp_path, env={"TREADLE_HUB_TOKEN": TOKEN}) as hub:
        authorized = {"Authorization": f"Bearer {TOKEN}"}
        begin_a_run(hub.url, authorized)
        num_cases = tried(hub, "--header", f"Authorization: Bearer {TOKEN}", max_examples=6)
        assert num_cases > 200
        assert_well(hub)
        for path in httpx.get(f"{hub.url}/openapi.json", headers=authorized).json()["paths"]:
            assert httpx.get(hub.url + path).status_code == (200 if path == "/healthz" else 401)


def assert_well(hub: HubProcess) -> None:
    assert httpx.get(f"{hub.url}/healthz").status_code == 200
    log = hub.log_file.read_text()
    for bad in ("Traceback", "internal_error", "job_failed", "read_failed", "write_failed", "validation_worker_died"):
        assert bad not in log
