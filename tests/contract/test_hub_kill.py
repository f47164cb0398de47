"""kill -9 at every critical point: accepted groups are there once after the restart, and the hub continues."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.kill_clients import Poster, Trainer, group, register, register_env, tags_of
from tests.hub_process import HubProcess
from treadle import faults

NUM_SEEDS = int(os.environ.get("TREADLE_KILL_SEEDS", "4"))
SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(1, NUM_SEEDS))]
# At which passage the process is killed: the n-th of that point, drawn from this range. The first few are those of the
# registrations.
PASSAGES = {
    "store:before_commit": (5, 60),
    "store:after_commit": (5, 60),
    "store:forming": (2, 12),
    "store:renewing": (1, 12),
    "store:checkpoint": (1, 1),
    "hub:before_reply": (8, 80),
    "hub:stopping": (1, 1),
}


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubProcess]:
    started = HubProcess(tmp_path, "--validation-workers", "1")
    yield started
    started.end()


def test_every_point_in_the_code_is_named_and_every_named_one_is_killed_at():
    source = Path(faults.__file__).parent
    in_code = {point for file in source.rglob("*.py") for point in re.findall(r'reach\("([^"]+)"\)', file.read_text())}
    assert in_code == {*faults.POINTS, *faults.ENGINE_POINTS}
    assert set(faults.POINTS) == set(PASSAGES)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("point", faults.POINTS)
def test_killed_there_nothing_is_lost_doubled_or_stuck(hub: HubProcess, point: str, seed: int):
    rng = random.Random(f"{point}{seed}")
    fault = f"{point}:{rng.randint(*PASSAGES[point])}:kill9"
    hub.start(fault)
    first_cpu_s = hub.cpu_s
    with hub.client() as client:
        register(client, starting_step=7)
        assert register_env(client) == 0
    posters = [Poster(hub, 100_000 * (1 + number), keyed=number % 2 == 0) for number in range(4)]
    trainer = Trainer(hub, step=7)
    at_work = threading.Thread(target=trainer.work, daemon=True)
    for thread in (*posters, at_work):
        thread.start()
    if point == "hub:stopping":
        time.sleep(1.0)
        hub.send(signal.SIGTERM)
    assert hub.wait(60) == -signal.SIGKILL, f"{fault} was not reached:\n{hub.log[-2000:]}"
    for thread in (*posters, at_work):
        thread.join(60)
    assert not any(poster.odd_answers for poster in posters if point != "hub:stopping"), posters[0].odd_answers

    hub.start()
    assert hub.cpu_s - first_cpu_s < 1.0  # of processor time: on an idle machine it is ready as quickly
    with hub.client() as client:
        status = client.get("/v1/status").json()
        assert status["step"] in (trainer.step, trainer.step + 1)  # the last answer may not have arrived
        assert [env["name"] for env in status["envs"]] == ["math_0"]
        assert status["batch_size"] == 4
        sums = ("queued_groups", "leased_groups", "trained_groups", "dropped_groups", "dead_groups")
        assert status["accepted_groups"] == sum(status[name] for name in sums) == status["envs"][0]["groups_accepted"]
        retried = _ask_again(client, posters)
        trainer.go_on(client)  # our trainer, without registering again
        assert client.post("/scored_data_list", json=[group(1), group(2), group(3)]).status_code == 200
        taken = tags_of(client.get("/batch").json()["batch"])  # and one of Atropos'
        status = client.get("/v1/status").json()
        assert status["step"] == trainer.step + 1
    assert hub.stop()[0] == 0
    accepted = [tag for poster in posters for tag in poster.accepted] + [1, 2, 3] + retried
    _check_the_file(hub.database, accepted, {*accepted, *(poster.in_doubt for poster in posters)}, trainer, taken)


def _ask_again(client, posters: list[Poster]) -> list[int]:
    """Clients with keys repeat what was not answered, and some of what was."""
    retried = []
    for poster in (each for each in posters if each.keyed):
        if poster.in_doubt is not None:
            body = group(poster.in_doubt, num_tokens=2000 if poster.in_doubt % 4 == 0 else 10)
            answer = client.post("/scored_data", json=body, headers=poster.headers(poster.in_doubt))
            assert answer.json()["status"] in ("received", "duplicate")
            retried.append(poster.in_doubt)
        for tag in poster.accepted[-3:]:
            body = group(tag, num_tokens=2000 if tag % 4 == 0 else 10)
            assert client.post("/scored_data", json=body, headers=poster.headers(tag)).json() == {"status": "duplicate"}
    return retried


def _check_the_file(database: Path, accepted: list[int], possible: set, trainer: Trainer, taken: list[int]) -> None:
    with sqlite3.connect(database) as db:
        rows = db.execute("SELECT g.id, g.state, p.body FROM groups AS g JOIN payloads AS p ON p.id = g.id").fetchall()
        batches = db.execute("SELECT step, state, group_ids FROM batches ORDER BY step").fetchall()
    tags = {group_id: json.loads(body)["tokens"][0][0] for group_id, _, body in rows}
    states = {tags[group_id]: state for group_id, state, _ in rows}
    times = Counter(tags.values())
    assert not [tag for tag in accepted if times[tag] != 1], "lost, or there twice"
    assert set(times) <= possible
    in_batches = [group_id for _, _, ids in batches for group_id in json.loads(ids)]
    assert len(in_batches) == len(set(in_batches)), "a group is in two batches"
    of_step = {step: [tags[group_id] for group_id in json.loads(ids)] for step, state, ids in batches}
    assert {step: of_step[step] for step in trainer.trained} == trainer.trained
    assert of_step[trainer.step + 1] == taken
    trained = sorted(tag for each in of_step.values() for tag in each)
    assert trained == sorted(tag for tag, state in states.items() if state == "trained")
    assert [step for step, *_ in batches] == list(range(8, trainer.step + 2)), "no step without its batch"
    assert sum(state == "queued" for state in states.values()) <= 2  # less than a batch
