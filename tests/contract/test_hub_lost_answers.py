"""Atropos' trainers cannot acknowledge: a batch whose answer was not sent is delivered again."""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path

import httpx
import pytest

from tests.contract.test_hub_feed import hub

NUM_TOKENS = 400_000  # two groups of this are several MB: more than any socket buffers


def post(client: httpx.Client, tag: int) -> None:
    row = [tag] * NUM_TOKENS
    group = {"tokens": [row] * 2, "masks": [row] * 2, "scores": [0.0, 1.0]}
    assert client.post("/scored_data", json=group, timeout=60).status_code == 200


def register(client: httpx.Client) -> None:
    trainer = {
        "wandb_group": "", "wandb_project": "", "batch_size": 4, "max_token_len": 0, "checkpoint_dir": "",
        "save_checkpoint_interval": 5, "starting_step": 0, "num_steps": 10,
    }  # fmt: skip
    assert client.post("/register", json=trainer).status_code == 200


def ask_and_hang_up(client: httpx.Client) -> None:
    """As a client whose patience ends while the answer is on its way."""
    with socket.create_connection((client.base_url.host, client.base_url.port)) as line:
        line.sendall(b"GET /batch HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        assert line.recv(12) == b"HTTP/1.1 200"


def tags(client: httpx.Client) -> list[int]:
    return [group["tokens"][0][0] for group in client.get("/batch", timeout=60).json()["batch"] or []]


def test_a_batch_that_the_trainer_did_not_get_comes_again_and_counts_once(tmp_path: Path):
    with hub(tmp_path) as client:
        register(client)
        for tag in (1, 2, 3, 4):
            post(client, tag)
        ask_and_hang_up(client)
        deadline = time.monotonic() + 10
        while "batch_not_delivered" not in (tmp_path / "hub.log").read_text():
            assert time.monotonic() < deadline, (tmp_path / "hub.log").read_text()
            time.sleep(0.02)
        assert client.get("/status").json()["current_step"] == 0
        assert tags(client) == [1, 2]
        assert client.get("/status").json()["current_step"] == 1
        assert tags(client) == [3, 4]
        assert client.get("/status").json() == {"current_step": 2, "queue_size": 0}
        assert client.get("/v1/status").json()["trained_groups"] == 4


def test_the_step_is_counted_before_anybody_can_ask_for_it(tmp_path: Path):
    with hub(tmp_path) as client:
        register(client)
        small = {"tokens": [[1, 2]] * 4, "masks": [[1, 2]] * 4, "scores": [0.0] * 4}
        for step in range(1, 60):
            assert client.post("/scored_data", json=small).status_code == 200
            assert client.get("/batch").json()["batch"]
            assert client.get("/status").json()["current_step"] == step


def read_whole(client: httpx.Client, head: bytes) -> list[int]:
    """Read exactly what was announced, and close at once, as clients do that use a connection once."""
    with socket.create_connection((client.base_url.host, client.base_url.port)) as line:
        line.sendall(b"GET /batch HTTP/1.1\r\nHost: 127.0.0.1\r\n" + head + b"\r\n")
        stream = line.makefile("rb")
        length = 0
        while (field := stream.readline()) != b"\r\n":
            if field.lower().startswith(b"content-length:"):
                length = int(field.split(b":")[1])
        body = stream.read(length)
    return [group["tokens"][0][0] for group in json.loads(body)["batch"] or []]


@pytest.mark.parametrize("head", [b"", pytest.param(b"Connection: close\r\n", marks=pytest.mark.full)])
def test_a_large_batch_that_was_read_whole_never_comes_again(tmp_path: Path, head: bytes):
    """It does not fit into the system's buffers, so its end leaves just before the client closes."""
    with hub(tmp_path) as client:
        register(client)
        for tag in range(1, 9):
            post(client, tag)
        for step in range(1, 5):
            assert read_whole(client, head) == [2 * step - 1, 2 * step]
            assert client.get("/status").json()["current_step"] == step
        assert "batch_not_delivered" not in (tmp_path / "hub.log").read_text()


def test_a_batch_whose_request_turned_out_to_be_broken_is_not_lost(tmp_path: Path):
    """The hub begins with the answer when it has the head; the bad chunk comes after that, and gets a 400."""
    with hub(tmp_path) as client:
        register(client)
        small = {"tokens": [[1, 2]] * 4, "masks": [[1, 2]] * 4, "scores": [0.0] * 4}
        refused = 0
        for _ in range(10):
            assert client.post("/scored_data", json=small).status_code == 200
            with socket.create_connection((client.base_url.host, client.base_url.port)) as line:
                line.sendall(b"GET /batch HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n")
                refused += line.recv(12) == b"HTTP/1.1 400"
        assert refused
        deadline = time.monotonic() + 5
        while client.get("/v1/status").json()["trained_groups"] != 10 - refused and time.monotonic() < deadline:
            time.sleep(0.05)
        assert client.get("/v1/status").json()["trained_groups"] == 10 - refused
        for _ in range(refused):
            assert client.get("/batch").json()["batch"]
        assert client.get("/v1/status").json()["trained_groups"] == 10
