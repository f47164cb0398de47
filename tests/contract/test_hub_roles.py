"""Which role may use which route of a real hub, and which steps and versions are refused."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import msgspec
import pytest

from tests.contract.atropos_calls import ENV, TRAINER, group
from tests.hub_process import HubProcess
from treadle.net.access_tokens import CLIENT_ROLES, role_token
from treadle.wire.hub import ProcessReport

TOKEN, ADMIN = "main-token-of-a-test-0123", "admin-token-of-a-test-0123"
REGISTRATION = TRAINER | {"batch_size": 2}
GROUP = group()
UPDATE = {"token": "none"}


def report(kind: str) -> dict[str, object]:
    return msgspec.to_builtins(ProcessReport(kind=kind, name=kind, machine="m", pid=1))  # type: ignore[arg-type]


# (method, path, body) and the roles that may; a role that may gets another answer than 403.
ROUTES = [
    ("POST", "/register", REGISTRATION, {"trainer"}),
    ("GET", "/batch", None, {"trainer"}),
    ("POST", "/v1/lease", {"step": 1, "holder": "t"}, {"trainer"}),
    ("POST", "/v1/batches/1/renew", UPDATE, {"trainer"}),
    ("POST", "/v1/batches/1/ack", UPDATE, {"trainer"}),
    ("POST", "/v1/batches/1/nack", UPDATE, {"trainer"}),
    ("POST", "/register-env", ENV, {"environment"}),
    ("POST", "/disconnect-env", {"env_id": 0}, {"environment"}),
    ("POST", "/scored_data", GROUP, {"environment"}),
    ("POST", "/scored_data_list", [GROUP], {"environment"}),
    ("POST", "/v1/groups", None, {"environment"}),
    ("GET", "/status-env?env_id=0", None, {"environment"}),
    ("GET", "/v1/envs/0", None, {"environment"}),
    ("POST", "/v1/reports", report("env"), {"environment"}),
    ("POST", "/v1/reports", report("trainer"), {"trainer"}),
    ("POST", "/v1/reports", report("engine"), {"engine"}),
    ("POST", "/v1/reports", report("hub"), set()),
    ("POST", "/v1/engines/verdicts", {"engines": []}, {"trainer"}),
    ("POST", "/v1/reset", None, set()),
    ("GET", "/reset_data", None, set()),
    *(
        ("GET", path, None, set(CLIENT_ROLES))
        for path in (
            "/", "/info", "/wandb_info", "/status", "/latest_example", "/v1/status", "/v1/explain", "/v1/dead-letters",
            "/v1/processes", "/v1/engines",
            "/v1/engines/history", "/metrics", "/openapi.json", "/healthz", "/dash/", "/dash/api/groups",
        )
    ),
]  # fmt: skip


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubProcess]:
    env = {"TREADLE_HUB_TOKEN": TOKEN, "TREADLE_HUB_ADMIN_TOKEN": ADMIN}
    with HubProcess(tmp_path_factory.mktemp("roles"), env=env) as running:
        yield running


def calling(hub: HubProcess, token: str) -> httpx.Client:
    return httpx.Client(base_url=hub.url, timeout=20.0, headers={"Authorization": f"Bearer {token}"})


def test_each_route_is_for_its_roles(hub: HubProcess):
    for role in CLIENT_ROLES:
        with calling(hub, role_token(TOKEN, role)) as client:
            for method, path, body, roles in ROUTES:
                answer = client.request(method, path, json=body)
                assert (answer.status_code == 403) == (role not in roles), (role, method, path, answer.text)
                assert answer.status_code != 401
                if answer.status_code == 403:
                    assert "token" in answer.json()["detail"]


def test_every_route_of_the_description_is_checked(hub: HubProcess):
    with calling(hub, role_token(TOKEN, "observer")) as client:
        paths = client.get("/openapi.json").json()["paths"]
    described = {(method.upper(), path) for path, methods in paths.items() for method in methods}
    checked = {(method, path.partition("?")[0]) for method, path, _, _ in ROUTES}
    checked |= {("GET", "/v1/envs/{env_id}"), ("GET", "/v1/events")}
    checked |= {("POST", f"/v1/batches/{{step}}/{verb}") for verb in ("renew", "ack", "nack")}
    assert described <= checked


def test_main_and_admin_tokens_may_do_what_they_did(hub: HubProcess):
    for token in (TOKEN, ADMIN):
        with calling(hub, token) as client:
            assert client.get("/reset_data").text == "Reset successful"
            assert client.post("/register", json=REGISTRATION).status_code == 200
            assert client.post("/scored_data", json=GROUP).status_code == 200
            assert len(client.get("/batch").json()["batch"]) == 1


def test_a_step_or_a_version_far_ahead_is_refused(hub: HubProcess):
    with calling(hub, ADMIN) as client:
        client.get("/reset_data")
        early = client.post("/scored_data", json=GROUP | {"policy_version": 10**17})
        assert early.status_code == 422  # before a trainer has registered too
        client.post("/register", json=REGISTRATION | {"starting_step": 7})
        assert client.post("/scored_data", json=GROUP | {"policy_version": 7}).status_code == 200
        for step in (9, 10**17):
            answer = client.post("/v1/lease", json={"step": step, "holder": "t"})
            assert answer.status_code == 422
            assert "at most step 8" in answer.json()["detail"][0]["msg"]
            future = client.post("/scored_data", json=GROUP | {"policy_version": step})
            assert (future.status_code, future.json()["detail"][0]["type"]) == (422, "future_version")
        assert client.post("/v1/lease", json={"step": 8, "holder": "t"}).json()["batch"]["step"] == 8
        assert client.post("/v1/lease", json={"step": 9, "holder": "t"}).json()["batch"] is None


CLIENTS = """
import asyncio, sys
from treadle.envs.hub_client import HubClient
from treadle.errors import HubError
from treadle.train.feed import HubFeed
from treadle.watch.watchdog import Heartbeat
from treadle.watch.waits import Waits
from treadle.wire.hub import ProcessReport, RegisterTrainer

url, kind = sys.argv[1:]

async def env():
    async with HubClient(url) as hub:
        await hub.info()
        await hub.post_groups([], "key")

def trainer():
    feed = HubFeed(url, lambda: None, Waits())
    feed.register(RegisterTrainer(
        wandb_group="", wandb_project="", batch_size=2, max_token_len=64, checkpoint_dir="c",
        save_checkpoint_interval=5, starting_step=0, num_steps=10,
    ))

asyncio.run(env()) if kind == "env" else trainer()
assert Heartbeat(url).send(ProcessReport(kind=kind, name=kind, machine="m", pid=1)) is not None
"""


@pytest.mark.parametrize(("kind", "role"), [("env", "environment"), ("trainer", "trainer")])
def test_our_clients_take_their_token_from_the_environment(hub: HubProcess, kind: str, role: str):
    words = [sys.executable, "-c", CLIENTS, hub.url, kind]
    for own, is_let_in in ((role, True), ("observer", False)):
        env = {**os.environ, "TREADLE_HUB_TOKEN": role_token(TOKEN, own)}  # type: ignore[arg-type]
        done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=60, check=False)
        assert (done.returncode == 0) == is_let_in, done.stderr
        assert is_let_in or "403" in done.stderr


def test_the_token_of_a_role_is_printed(tmp_path: Path):
    def treadle_token(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "treadle", "token", *words]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)

    missing = treadle_token("trainer", "--token-file", "hub.token")
    assert (missing.returncode, list(tmp_path.iterdir())) == (2, [])
    file = tmp_path / "hub.token"
    file.write_text(TOKEN + "\n")
    file.chmod(0o600)
    assert treadle_token("trainer", "--token-file", "hub.token").stdout == role_token(TOKEN, "trainer") + "\n"
    assert treadle_token("trainer").returncode == 2
