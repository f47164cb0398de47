"""Two hubs on one PostgreSQL database serve one run: either may be killed, and the server may be restarted."""

from __future__ import annotations

import json
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.contract.kill_clients import group, register, register_env, tags_of
from tests.hub_process import HubProcess
from tests.postgres_server import PASSWORD, PostgresServer, rows_of

NUM_KILLS = 6
PATIENCE_S = 60.0


@pytest.fixture
def url(postgres: PostgresServer) -> str:
    return postgres.new_database()


@pytest.fixture
def hubs(tmp_path: Path, url: str) -> Iterator[list[HubProcess]]:
    """Two of them, on one database."""
    started = []
    for name in ("a", "b"):
        folder = tmp_path / name
        folder.mkdir()
        started.append(HubProcess(folder, "--validation-workers", "1", "--store", url, "--lease-s", "30"))
        started[-1].start()
    yield started
    for hub in started:
        hub.end()


class Caller:
    """Asks one hub, and the other one when it does not answer; a call is repeated until one has answered it."""

    def __init__(self, hubs: list[HubProcess], first: int) -> None:
        self._hubs = hubs
        self._now = first
        self.num_moves = 0

    def post(self, path: str, body: object, headers: dict[str, str] | None = None) -> httpx.Response:
        until_s = time.monotonic() + PATIENCE_S
        while True:
            try:
                with httpx.Client(base_url=self._hubs[self._now].url, timeout=20.0) as client:
                    answer = client.post(path, json=body, headers=headers)
                if answer.status_code != 503:
                    return answer
            except httpx.TransportError:
                pass
            assert time.monotonic() < until_s, "no hub has answered"
            self._now = 1 - self._now
            self.num_moves += 1
            time.sleep(0.02)


class Poster(threading.Thread):
    def __init__(self, hubs: list[HubProcess], number: int) -> None:
        super().__init__(daemon=True)
        self._caller = Caller(hubs, number % 2)
        self._first_tag = 100_000 * (number + 1)
        self.posted: list[int] = []
        self.stopping = threading.Event()
        self.problems: list[str] = []

    def run(self) -> None:
        for tag in range(self._first_tag, self._first_tag + 100_000):
            if self.stopping.is_set():
                return
            answer = self._caller.post("/scored_data", group(tag), {"Idempotency-Key": f"k{tag}"})
            if answer.status_code != 200:
                self.problems.append(f"{answer.status_code} {answer.text}")
            self.posted.append(tag)
            self.stopping.wait(0.01)


class Trainer(threading.Thread):
    """Leases, renews and acknowledges step after step; it trained what came with the lease that it acknowledged."""

    def __init__(self, hubs: list[HubProcess]) -> None:
        super().__init__(daemon=True)
        self.caller = Caller(hubs, 0)
        self.trained: dict[int, list[int]] = {}
        self.problems: list[str] = []
        self.stopping = threading.Event()

    def run(self) -> None:
        step = 1
        while not self.stopping.is_set():
            answer = self.caller.post("/v1/lease", {"step": step, "holder": "t", "wait_s": 1.0}).json()
            if answer.get("batch") is None:
                continue
            token = answer["batch"]["token"]
            for verb in ("renew", "ack"):
                done = self.caller.post(f"/v1/batches/{step}/{verb}", {"token": token})
                if done.status_code != 200:
                    self.problems.append(f"{verb} {step}: {done.status_code} {done.text}")
            self.trained[step] = tags_of(answer["batch"]["groups"])
            step += 1


def check_the_database(url: str, posted: list[int], trainer: Trainer) -> None:
    """Every posted group is there once, and was trained at most once, in the batch that the trainer says."""
    rows = rows_of(url, "SELECT g.id, g.state, p.body FROM groups g JOIN payloads p ON p.id = g.id")
    tags = {group_id: json.loads(body)["tokens"][0][0] for group_id, _, body in rows}
    assert Counter(tags.values()) == Counter(posted)
    batches = rows_of(url, "SELECT step, group_ids FROM batches WHERE state = 'trained' ORDER BY step")
    of_step = {step: [tags[group_id] for group_id in json.loads(ids)] for step, ids in batches}
    assert of_step == trainer.trained
    assert max(Counter(tag for trained in of_step.values() for tag in trained).values()) == 1
    assert list(of_step) == list(range(1, len(of_step) + 1)), "no step without its batch"


def at_work(hubs: list[HubProcess]) -> tuple[list[Poster], Trainer]:
    with hubs[0].client() as client:
        register(client)
        register_env(client)
    posters, trainer = [Poster(hubs, number) for number in range(4)], Trainer(hubs)
    for thread in (*posters, trainer):
        thread.start()
    return posters, trainer


def stop(posters: list[Poster], trainer: Trainer) -> list[int]:
    for poster in posters:
        poster.stopping.set()
        poster.join(PATIENCE_S)
    trainer.stopping.set()
    trainer.join(PATIENCE_S)
    assert not trainer.is_alive()
    assert [problem for each in (*posters, trainer) for problem in each.problems] == []
    return [tag for poster in posters for tag in poster.posted]


def until_steps(trainer: Trainer, num: int) -> None:
    until_s = time.monotonic() + PATIENCE_S
    while len(trainer.trained) < num:
        assert time.monotonic() < until_s, f"no step after {len(trainer.trained)}"
        time.sleep(0.02)


def test_two_hubs_killed_in_turn_lose_nothing_and_train_nothing_twice(url: str, hubs: list[HubProcess]):
    posters, trainer = at_work(hubs)
    rng = random.Random(1)
    for kill in range(NUM_KILLS):
        until_steps(trainer, len(trainer.trained) + 3)
        time.sleep(rng.random() / 4)
        hubs[kill % 2].end()
        until_steps(trainer, len(trainer.trained) + 3)  # the other one goes on alone
        hubs[kill % 2].start()
    posted = stop(posters, trainer)
    assert trainer.caller.num_moves >= 1
    check_the_database(url, posted, trainer)


def test_a_trainer_keeps_its_lease_when_the_hub_that_gave_it_dies(hubs: list[HubProcess]):
    with hubs[0].client() as client:
        register(client)
        register_env(client)
        assert client.post("/scored_data_list", json=[group(tag) for tag in range(4)]).status_code == 200
        batch = client.post("/v1/lease", json={"step": 1, "holder": "t", "wait_s": 5.0}).json()["batch"]
    hubs[0].end()
    with hubs[1].client() as client:
        refused = client.post("/v1/lease", json={"step": 1, "holder": "other", "wait_s": 0.0})
        assert (refused.status_code, "leased by 't'" in refused.text) == (409, True)
        update = {"token": batch["token"]}
        assert client.post("/v1/batches/1/renew", json=update).status_code == 200
        assert client.post("/v1/batches/1/ack", json=update).json()["current_step"] == 1
        assert client.get("/v1/status").json()["trained_groups"] == 2


def test_a_post_to_one_hub_wakes_the_trainer_that_waits_at_the_other(hubs: list[HubProcess]):
    took_s: list[float] = []
    with hubs[0].client() as client, hubs[1].client() as trainer, ThreadPoolExecutor(1) as pool:
        register(client)
        register_env(client)

        def wait(step: int) -> tuple[Any, float]:
            batch = trainer.post("/v1/lease", json={"step": step, "holder": "t", "wait_s": 25.0}).json()["batch"]
            return batch, time.monotonic()

        while len(took_s) < 3 and min(took_s, default=2.0) >= 2.0:  # other processes may keep the machine busy
            step = len(took_s) + 1
            waiting = pool.submit(wait, step)
            time.sleep(1.0)  # until it waits; it would be answered at once if it came later
            posted_s = time.monotonic()
            new = [2 * step, 2 * step + 1]
            assert client.post("/scored_data_list", json=[group(tag) for tag in new]).status_code == 200
            batch, answered_s = waiting.result(PATIENCE_S)
            assert tags_of(batch["groups"]) == new
            took_s.append(answered_s - posted_s)
            assert trainer.post(f"/v1/batches/{step}/ack", json={"token": batch["token"]}).status_code == 200
    assert min(took_s) < 2.0, "it was not woken, but asked again by itself"


def test_hubs_tell_each_other_who_is_there(hubs: list[HubProcess]):
    verdicts = {"engines": [{"engine_id": "a", "url": "http://a:1", "state": "serving"}]}
    with hubs[0].client() as first, hubs[1].client() as second:
        register(first)
        env_id = register_env(first)
        judged = first.post("/v1/engines/verdicts", json=verdicts).json()
        until_s = time.monotonic() + PATIENCE_S
        while True:
            first.get(f"/v1/envs/{env_id}")
            first.post("/v1/lease", json={"step": 1, "holder": "t", "wait_s": 0.0})
            # Asked at the second hub: a trainer waits at the first one, and the environment calls only there.
            idle_s = second.get("/v1/status").json()["envs"][0]["idle_s"]
            waits = second.get(f"/v1/envs/{env_id + 1}")  # no such environment: asking marks nobody as alive
            assert waits.status_code == 404
            if idle_s < 3.0 and time.monotonic() > until_s - PATIENCE_S + 5.0:
                break  # after 5 s a hub that hears nothing from the other one would say more
            assert time.monotonic() < until_s, idle_s
            time.sleep(0.2)
        assert second.get(f"/v1/envs/{env_id}").json()["trainer_waits"]
        table = second.get("/v1/engines").json()
        assert (table["has_trainer"], table["engines"][0]["state"]) == (True, "serving")
        assert judged["spread_s"] == table["spread_s"] > 0, "the trainer waits for the other hubs"


def test_events_of_one_hub_reach_readers_at_the_other(hubs: list[HubProcess]):
    with hubs[0].client() as first, hubs[1].client() as second, second.stream("GET", "/v1/events?after=0") as events:
        register(first)
        register_env(first)
        assert first.post("/scored_data", json=group(1)).status_code == 200
        kinds = (line.removeprefix("event: ") for line in events.iter_lines() if line.startswith("event: "))
        assert [next(kinds) for _ in range(3)] == ["trainer_registered", "env_registered", "accepted"]


@pytest.mark.parametrize("ending", ["stop", "kill"])
def test_a_restart_of_the_server_is_waited_for_and_loses_nothing(tmp_path: Path, ending: str):
    with PostgresServer() as server:
        url = server.new_database()
        hub = HubProcess(tmp_path, "--validation-workers", "1", "--store", url)
        hub.start()
        posters, trainer = at_work([hub, hub])
        try:
            for _ in range(2):
                until_steps(trainer, len(trainer.trained) + 3)
                getattr(server, ending)()
                time.sleep(0.5)
                server.start()
                until_steps(trainer, len(trainer.trained) + 3)
            posted = stop(posters, trainer)
            check_the_database(url, posted, trainer)
        finally:
            hub.end()


@pytest.mark.full  # a rare state
def test_a_hub_stopped_in_a_transaction_does_not_hold_up_the_other(url: str, hubs: list[HubProcess]):
    """As when its machine is suspended: the server ends its transaction after 10 s."""
    posters, trainer = at_work(hubs)
    until_steps(trainer, 3)
    hubs[0].send(signal.SIGSTOP)
    try:
        until_steps(trainer, len(trainer.trained) + 5)
    finally:
        hubs[0].send(signal.SIGCONT)
    until_steps(trainer, len(trainer.trained) + 3)
    posted = stop(posters, trainer)
    check_the_database(url, posted, trainer)


def test_no_password_is_in_logs_answers_or_refusals(tmp_path: Path, url: str, hubs: list[HubProcess]):
    with hubs[0].client() as client:
        for path in ("/v1/status", "/v1/explain", "/v1/processes", "/metrics", "/status", "/info", "/dash/"):
            assert PASSWORD not in client.get(path).text
    wrong = HubProcess(tmp_path, "--store", url.replace(PASSWORD, "wr0ng"))
    assert wrong.launch().wait(60) == 2
    assert "password authentication failed" in wrong.log
    assert "PGPASSWORD" in wrong.log
    assert "wr0ng" not in wrong.log
    for hub in hubs:
        hub.stop()
        assert PASSWORD not in hub.log
        assert "queue=postgresql://127.0.0.1" in hub.log
