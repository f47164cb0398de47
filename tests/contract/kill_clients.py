"""Clients of a hub that is killed: they record which calls were answered and which have an unknown result."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import httpx

from tests.hub_process import HubProcess


def workers_of(hub: HubProcess) -> list[int]:
    """Process ids of the validation workers."""
    assert hub.process is not None
    children = Path(f"/proc/{hub.process.pid}/task/{hub.process.pid}/children").read_text().split()
    found = []
    for child in map(int, children):
        try:
            if b"treadle.hub.validation_workers" in Path(f"/proc/{child}/cmdline").read_bytes():
                found.append(child)
        except OSError:
            continue  # it has just ended
    return found


def group(tag: int, num_tokens: int = 3, **fields: Any) -> dict[str, Any]:
    tokens = [tag, *([1] * (num_tokens - 1))]
    return {"tokens": [tokens] * 2, "masks": [tokens] * 2, "scores": [0.0, 1.0], "env_id": 0, **fields}


def tags_of(groups: list[dict[str, Any]]) -> list[int]:
    return [each["tokens"][0][0] for each in groups]


def register(client: httpx.Client, starting_step: int = 0, **fields: Any) -> None:
    body = {
        "wandb_group": "g", "wandb_project": "p", "batch_size": 4, "max_token_len": 100_000,
        "checkpoint_dir": "c", "save_checkpoint_interval": 5, "starting_step": starting_step, "num_steps": 1000,
    }  # fmt: skip
    assert client.post("/register", json=body | fields).status_code == 200


def register_env(client: httpx.Client) -> int:
    """As Atropos' environments do it: again and again until the trainer has asked for its first batch."""
    client.get("/batch")
    body = {"max_token_length": 9, "desired_name": "math", "weight": 1.0, "group_size": 2}
    answer = client.post("/register-env", json=body).json()
    assert answer["status"] == "success", answer
    return answer["env_id"]


class Poster(threading.Thread):
    """Posts group after group until the hub is gone. Knows what was answered, and what it cannot know."""

    def __init__(self, hub: HubProcess, first_tag: int, *, keyed: bool) -> None:
        super().__init__(daemon=True)
        self._hub = hub
        self._first_tag = first_tag
        self.keyed = keyed
        self.accepted: list[int] = []
        self.in_doubt: int | None = None
        self.odd_answers: list[str] = []
        self.stopping = threading.Event()

    def headers(self, tag: int) -> dict[str, str]:
        return {"Idempotency-Key": f"k{tag}"} if self.keyed else {}

    def run(self) -> None:
        with self._hub.client() as client:
            for tag in range(self._first_tag, self._first_tag + 5000):
                if self.stopping.is_set():
                    return
                body = group(tag, num_tokens=2000 if tag % 4 == 0 else 10)  # large ones go through a worker
                try:
                    answer = client.post("/scored_data", json=body, headers=self.headers(tag))
                except httpx.TransportError:
                    self.in_doubt = tag
                    return
                if answer.status_code == 200 and answer.json() == {"status": "received"}:
                    self.accepted.append(tag)
                else:
                    self.odd_answers.append(f"{answer.status_code} {answer.text}")


class Trainer:
    """Leases, renews and acknowledges as our trainer does. What it was answered is kept; `go_on` after a restart."""

    def __init__(self, hub: HubProcess, step: int = 0) -> None:
        self._hub = hub
        self.step = step  # the last acknowledged
        self.trained: dict[int, list[int]] = {}  # tags by step
        self.held: tuple[str, list[int]] | None = None
        self.stopping = threading.Event()

    def work(self) -> None:
        """Work until the hub is gone or `stopping` is set."""
        with self._hub.client() as client:
            while not self.stopping.is_set():
                try:
                    if not self.train_one(client, wait_s=0.5) and self._hub.process.poll() is not None:
                        return
                except httpx.TransportError:
                    return

    def train_one(self, client: httpx.Client, wait_s: float = 0.0) -> bool:
        step = self.step + 1
        if self.held is None:
            asked = {"step": step, "holder": "t", "wait_s": wait_s}
            batch = client.post("/v1/lease", json=asked).raise_for_status().json()["batch"]
            if batch is None:
                return False
            assert batch["step"] == step
            self.held = (batch["token"], tags_of(batch["groups"]))
        token, tags = self.held
        client.post(f"/v1/batches/{step}/renew", json={"token": token}).raise_for_status()
        client.post(f"/v1/batches/{step}/ack", json={"token": token}).raise_for_status()
        self.step, self.held = step, None
        self.trained[step] = tags
        return True

    def go_on(self, client: httpx.Client) -> None:
        """The answer to the last acknowledgement may be lost: then it is repeated, with the same token."""
        if self.held is not None and client.get("/v1/status").json()["step"] == self.step + 1:
            token, tags = self.held
            client.post(f"/v1/batches/{self.step + 1}/ack", json={"token": token}).raise_for_status()
            self.step, self.held = self.step + 1, None
            self.trained[self.step] = tags
        while self.train_one(client):
            pass
