from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from treadle.config.schema import HubConfig
from treadle.hub.endpoint import access_of
from treadle.hub.process import app_of
from treadle.hub.state import HubState
from treadle.store import SqliteStore, Store

LOCAL = "http://127.0.0.1:8000"


class HandClock:
    """A monotonic clock that a test moves by hand."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class HubCalls:
    """The calls that most tests make, over a client of the real application."""

    def __init__(self, client: TestClient) -> None:
        self.client = client

    def group(self, size: int = 2, tag: int = 7, **fields: Any) -> dict[str, Any]:
        return {"tokens": [[tag, 2]] * size, "masks": [[-100, 2]] * size, "scores": [1.0] * size, **fields}

    def register(self, headers: dict[str, str] | None = None, **fields: Any) -> None:
        body = {
            "wandb_group": "g", "wandb_project": "p", "batch_size": 4, "max_token_len": 128,
            "checkpoint_dir": "c", "save_checkpoint_interval": 5, "starting_step": 0, "num_steps": 10,
        }  # fmt: skip
        assert self.client.post("/register", json=body | fields, headers=headers).status_code == 200

    def post(self, *tags: int, **fields: Any) -> None:
        for tag in tags:
            answer = self.client.post("/scored_data", json=self.group(tag=tag, **fields))
            assert (answer.status_code, answer.json()) == (200, {"status": "received"})

    def register_env(self, headers: dict[str, str] | None = None, **fields: Any) -> dict[str, Any]:
        body = {"max_token_length": 512, "desired_name": "math", "weight": 1.0, "group_size": 2} | fields
        answer = self.client.post("/register-env", json=body, headers=headers)
        assert answer.status_code == 200
        return answer.json()

    def lease(self, step: int, holder: str = "a") -> dict[str, Any]:
        answer = self.client.post("/v1/lease", json={"step": step, "holder": holder})
        assert answer.status_code == 200, answer.text
        return answer.json()

    def tags(self, groups: list[dict[str, Any]]) -> list[int]:
        return [group["tokens"][0][0] for group in groups]


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HubConfig:
    monkeypatch.setattr("treadle.hub.state.MAX_DELIVERIES", 2)
    return HubConfig(database=tmp_path / "hub.sqlite", lease_s=60.0, queue_limit_groups=50)


@pytest.fixture
def store(config: HubConfig, clock: HandClock) -> Iterator[Store]:
    with SqliteStore.open(config.database, clock=clock, max_bytes=20_000_000) as opened:
        yield opened


@pytest.fixture
def client(store: Store, config: HubConfig, clock: HandClock) -> Iterator[TestClient]:
    with TestClient(
        app_of(HubState.build(store, config, clock), access_of(config, os.environ)), LOCAL, client=("127.0.0.1", 50_000)
    ) as opened:
        yield opened


@pytest.fixture
def calls(client: TestClient) -> HubCalls:
    return HubCalls(client)
