"""A real hub process over one database file, that may be killed and started again, and the clients that use it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx

READY_S = 30.0  # a loaded machine is slow to import; the promise of 2 s is asserted where it is made


class KillableHub:
    def __init__(self, folder: Path, *flags: str, database: Path | None = None) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.database = database or folder / "hub.sqlite"
        self.flags = flags
        self.log_file = folder / "hub.log"
        self.url = f"http://127.0.0.1:{self.port}"
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def log(self) -> str:
        return self.log_file.read_text()

    def launch(self, fault: str = "") -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "treadle", "hub", "--port", str(self.port), "--database", str(self.database)]
        environment = os.environ | {"TREADLE_FAULT": fault}
        with self.log_file.open("ab") as log:
            self.process = subprocess.Popen([*command, *self.flags], stdout=log, stderr=log, env=environment)
        return self.process

    def start(self, fault: str = "") -> float:
        """Seconds from the start of the process until it answers."""
        began = time.monotonic()
        process = self.launch(fault)
        while time.monotonic() - began < READY_S:
            assert process.poll() is None, self.log[-2000:]
            try:
                if httpx.get(f"{self.url}/healthz", timeout=2.0).status_code == 200:
                    return time.monotonic() - began
            except httpx.TransportError:
                time.sleep(0.01)
        raise AssertionError(f"the hub is not ready after {READY_S} s:\n{self.log[-2000:]}")

    def send(self, number: signal.Signals) -> None:
        assert self.process is not None
        os.kill(self.process.pid, number)

    def wait(self, timeout_s: float = 20.0) -> int:
        assert self.process is not None
        return self.process.wait(timeout_s)

    def stop(self) -> tuple[int, float]:
        """Exit code after SIGTERM, and the seconds it took."""
        began = time.monotonic()
        self.send(signal.SIGTERM)
        return self.wait(), time.monotonic() - began

    def end(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def porters(self) -> list[int]:
        """Process ids of the door workers."""
        assert self.process is not None
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        found = []
        for child in map(int, children):
            try:
                if b"treadle.hub.porter" in Path(f"/proc/{child}/cmdline").read_bytes():
                    found.append(child)
            except OSError:
                continue  # it has just ended
        return found

    def client(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=30.0)


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

    def __init__(self, hub: KillableHub, first_tag: int, *, keyed: bool) -> None:
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
                body = group(tag, num_tokens=2000 if tag % 4 == 0 else 10)  # large ones go through a porter
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

    def __init__(self, hub: KillableHub, step: int = 0) -> None:
        self._hub = hub
        self.step = step  # the last acknowledged
        self.trained: dict[int, list[int]] = {}  # tags by step
        self.held: tuple[str, list[int]] | None = None
        self.stopping = threading.Event()

    def work(self) -> None:
        """Until there is no hub, or until told to stop."""
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
        """The answer to the last acknowledgement may be what was lost: then it is said again, under the same token."""
        if self.held is not None and client.get("/v1/status").json()["step"] == self.step + 1:
            token, tags = self.held
            client.post(f"/v1/batches/{self.step + 1}/ack", json={"token": token}).raise_for_status()
            self.step, self.held = self.step + 1, None
            self.trained[self.step] = tags
        while self.train_one(client):
            pass
