"""The trainer's feed against a real hub: a lease is renewed while the trainer runs, and expires when it has died."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.hub_process import HubProcess
from treadle.errors import HubError
from treadle.train.feed import HubFeed
from treadle.watch.waits import Waits
from treadle.wire.hub import RegisterTrainer


def registration(**changes: Any) -> RegisterTrainer:
    fields = {
        "wandb_group": "", "wandb_project": "", "batch_size": 4, "max_token_len": 128, "checkpoint_dir": "",
        "save_checkpoint_interval": 5, "starting_step": 0, "num_steps": 10, "vocab_size": 1000,
    }  # fmt: skip
    return RegisterTrainer(**{**fields, **changes})


@contextmanager
def hub(folder: Path, *flags: str) -> Iterator[httpx.Client]:
    with HubProcess(folder, *flags) as process, process.client() as client:
        yield client
        process.stop()


def feed_of(client: httpx.Client) -> HubFeed:
    return HubFeed(str(client.base_url), lambda: None, Waits())


def post(client: httpx.Client, *tags: int) -> None:
    for tag in tags:
        group = {
            "tokens": [[tag, 2]] * 2, "masks": [[-100, 2]] * 2, "scores": [0.0, 1.0],
            "inference_logprobs": [[1.0, -0.5]] * 2,
        }  # fmt: skip
        assert client.post("/scored_data", json=group).status_code == 200


def tags(batch: Any) -> list[int]:
    return [group.tokens[0][0] for group in batch.groups]


def test_a_lease_is_renewed_for_as_long_as_the_step_takes(tmp_path):
    def keeps_its_lease(lease_s: float) -> bool:
        folder = tmp_path / str(lease_s)
        folder.mkdir()
        with hub(folder, "--lease-s", str(lease_s)) as client:
            feed = feed_of(client)
            feed.register(registration())
            post(client, 1, 2)
            batch = feed.lease(1)
            time.sleep(2.5 * lease_s)
            taken = client.post("/v1/lease", json={"step": 1, "holder": "another"})
            if taken.status_code == 200:
                return False
            assert taken.status_code == 409
            feed.ack(batch)
            assert client.get("/status").json()["current_step"] == 1
            return True

    assert any(map(keeps_its_lease, (1.0, 6.0)))  # on a busy machine a renewal may come too late for the short one


def test_a_failed_trainer_returns_its_batch_and_only_that_one_counts(tmp_path):
    with hub(tmp_path) as client:
        feed = feed_of(client)
        feed.register(registration())
        post(client, 1, 2, 3, 4)
        for delivery in range(1, 6):
            feed.lease_ahead(2)
            first, ahead = feed.lease(1), feed.lease(2)
            assert (tags(first), tags(ahead)) == ([1, 2], [3, 4]), f"delivery {delivery}"
            feed.give_back(f"RuntimeError: attempt {delivery}", counts=True)
            feed = feed_of(client)
            feed.register(registration())
        dead = client.get("/v1/dead-letters").json()["dead_letters"]
        assert {(group["step"], group["reason"]) for group in dead} == {(1, "RuntimeError: attempt 5")}
        assert len(dead) == 2
        post(client, 5, 6)
        assert tags(feed.lease(1)) == [5, 6]  # training goes on
        assert tags(feed.lease(2)) == [3, 4]


def test_a_trainer_that_is_merely_stopped_holds_nothing_against_its_batch(tmp_path):
    with hub(tmp_path) as client:
        for _ in range(7):
            feed = feed_of(client)
            feed.register(registration())
            post(client, 1, 2) if client.get("/v1/status").json()["accepted_groups"] == 0 else None
            assert tags(feed.lease(1)) == [1, 2]
            feed.give_back("the trainer was stopped", counts=False)
        assert client.get("/v1/status").json()["dead_groups"] == 0


def test_a_trainer_that_lost_its_lease_gets_an_error(tmp_path):
    with hub(tmp_path) as client:
        first, second = feed_of(client), feed_of(client)
        first.register(registration())
        post(client, 1, 2)
        batch = first.lease(1)
        second.register(registration())
        again = second.lease(1)
        assert tags(again) == tags(batch)
        with pytest.raises(HubError, match="one trainer at a time"):
            first.ack(batch)
        second.ack(again)


def test_stale_groups_are_dropped_and_counted(tmp_path):
    with hub(tmp_path, "--max-age", "1") as client:
        feed = feed_of(client)
        feed.register(registration(starting_step=5))
        for version in (2, 3, 4, 5):
            group = {
                "tokens": [[version, 2]] * 2, "masks": [[-100, 2]] * 2, "scores": [0.0, 1.0], "policy_version": version,
            }  # fmt: skip
            assert client.post("/scored_data", json=group).status_code == 200
        assert tags(feed.lease(6)) == [4, 5]  # the trainer is at version 5
        status = client.get("/v1/status").json()
        assert (status["dropped_groups"], status["leased_groups"]) == (2, 2)


def test_stale_groups_can_be_weighed_down_instead(tmp_path):
    with hub(tmp_path, "--max-age", "1", "--stale", "downweight") as client:
        feed = feed_of(client)
        feed.register(registration(starting_step=5))
        for version in (2, 5):
            group = {
                "tokens": [[version, 2]] * 2, "masks": [[-100, 2]] * 2, "scores": [0.0, 1.0], "policy_version": version,
            }  # fmt: skip
            assert client.post("/scored_data", json=group).status_code == 200
        batch = feed.lease(6)
        assert [group.weight for group in batch.groups] == [pytest.approx(1 / 3), 1.0]
        again = client.post("/v1/lease", content=json.dumps({"step": 6, "holder": "trainer"}), headers=JSON).json()
        assert [group["weight"] for group in again["batch"]["groups"]] == [pytest.approx(1 / 3), 1.0]


def test_a_run_can_begin_afresh_and_the_old_queue_is_kept(tmp_path):
    with hub(tmp_path) as client:
        post(client, 1, 2)
    with hub(tmp_path, "--fresh", "true") as client:
        assert client.get("/v1/status").json()["accepted_groups"] == 0
    (old,) = tmp_path.glob("hub.sqlite.2*[0-9]")
    old.rename(tmp_path / "hub.sqlite")
    with hub(tmp_path) as client:
        assert client.get("/v1/status").json()["queued_groups"] == 2


JSON = {"Content-Type": "application/json"}


def test_errors_distinguish_a_hanging_hub_from_a_missing_one():
    """A port that takes connections and never answers; then nobody is at it any more."""
    seen: list[tuple[str, str, str]] = []
    waits = Waits()

    def note_then_stop() -> None:
        (wait,) = [wait for wait in waits.now if wait.problem]
        seen.append((wait.wanted.what, wait.problem, wait.fix))
        if len(seen) == 1:
            listener.close()
        if "refused" in wait.problem:
            raise KeyboardInterrupt

    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        feed = HubFeed(f"{url}/t/secret", note_then_stop, waits, answer_s=0.3)
        with pytest.raises(KeyboardInterrupt):
            feed.register(registration())
    assert seen[0] == (
        f"the hub at {url}",
        "no answer within 0.3 s",
        f"see its log, or ask: treadle doctor --hub {url}",
    )
    assert seen[-1][2] == "start it with `treadle hub`, or name another with --hub-url"
    assert "secret" not in str(seen)
