"""Faults around a hub (signals, pauses, full disks, damaged files, dying workers): it reports them and continues."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.contract.kill_clients import Poster, Trainer, group, register, register_env, tags_of, workers_of
from tests.hub_process import HubProcess


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubProcess]:
    started = HubProcess(tmp_path, "--validation-workers", "1", "--lease-s", "1")
    yield started
    started.end()


@contextmanager
def prepared(hub: HubProcess) -> Iterator[httpx.Client]:
    """A started hub with a trainer (batches of 4 sequences) and one environment."""
    hub.start()
    with hub.client() as client:
        register(client)
        assert register_env(client) == 0
        yield client


# ---- signals


def test_sigterm_while_idle_ends_at_once_with_code_0(hub: HubProcess):
    with prepared(hub) as client:
        client.post("/scored_data", json=group(1))
    code, seconds = hub.stop()
    assert (code, seconds < 10) == (0, True)
    assert not Path(f"{hub.database}-wal").exists(), "all is in the one file"


def test_sigterm_while_busy_answers_or_refuses_everybody_and_loses_nothing(hub: HubProcess):
    with prepared(hub):
        posters = [Poster(hub, 10_000 * (1 + number), keyed=True) for number in range(6)]
        trainer = Trainer(hub)
        at_work = threading.Thread(target=trainer.work, daemon=True)
        for thread in (*posters, at_work):
            thread.start()
        while sum(len(poster.accepted) for poster in posters) < 60:
            time.sleep(0.01)
        code, seconds = hub.stop()
    for thread in (*posters, at_work):
        thread.join(30)
    assert (code, seconds < 10) == (0, True), hub.log[-2000:]
    assert not any(poster.odd_answers for poster in posters), posters[0].odd_answers
    with sqlite3.connect(hub.database) as db:
        (num_groups,) = db.execute("SELECT count(*) FROM groups").fetchone()
        (num_trained,) = db.execute("SELECT count(*) FROM groups WHERE state = 'trained'").fetchone()
    accepted = sum(len(poster.accepted) for poster in posters)
    assert accepted <= num_groups <= accepted + len(posters)
    assert 2 * len(trainer.trained) <= num_trained <= 2 * len(trainer.trained) + 2


LATE_TRAINER = """
import sys, httpx
with httpx.Client(base_url=sys.argv[1]) as client:
    batch = client.post("/v1/lease", json={"step": 1, "holder": "late"}).json()["batch"]
    print("leased", flush=True)
    sys.stdin.readline()
    print(client.post("/v1/batches/1/ack", json={"token": batch["token"]}).status_code, flush=True)
"""


def test_a_trainer_stopped_past_its_lease_cannot_acknowledge(tmp_path: Path):
    assert any(_outlives_the_lease(tmp_path, lease_s) for lease_s in (1, 6))


def _outlives_the_lease(tmp_path: Path, lease_s: int) -> bool:
    """False: on a busy machine the lease was over before another trainer asked for it."""
    folder = tmp_path / f"{lease_s} s"
    folder.mkdir()
    flags = ("--validation-workers", "1", "--lease-s", str(lease_s))
    with HubProcess(folder, *flags) as hub, hub.client() as client:
        register(client)
        assert register_env(client) == 0
        client.post("/scored_data_list", json=[group(1), group(2)])
        late = subprocess.Popen(
            [sys.executable, "-c", LATE_TRAINER, hub.url], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        try:
            assert late.stdout.readline() == "leased\n"
            os.kill(late.pid, signal.SIGSTOP)
            lease = {"step": 1, "holder": "other"}
            early = client.post("/v1/lease", json=lease)
            if early.status_code == 200:
                assert tags_of(early.json()["batch"]["groups"]) == [1, 2]
                return False
            assert early.status_code == 409
            time.sleep(lease_s + 0.1)
            batch = client.post("/v1/lease", json=lease).json()["batch"]
            assert tags_of(batch["groups"]) == [1, 2]
            os.kill(late.pid, signal.SIGCONT)
            late.stdin.write("\n")
            late.stdin.flush()
            assert late.stdout.readline() == "409\n"
        finally:
            late.kill()
            late.communicate()
        assert client.get("/v1/status").json()["trained_groups"] == 0
        assert client.post("/v1/batches/1/ack", json={"token": batch["token"]}).status_code == 200
        assert client.get("/v1/status").json()["trained_groups"] == 2
        return True


def test_a_hub_that_was_stopped_for_a_while_leaves_the_trainer_its_batch(hub: HubProcess):
    with prepared(hub) as client:
        client.post("/scored_data_list", json=[group(1), group(2)])
        batch = client.post("/v1/lease", json={"step": 1, "holder": "t"}).json()["batch"]
        hub.send(signal.SIGSTOP)
        time.sleep(1.5)
        hub.send(signal.SIGCONT)
        token = {"token": batch["token"]}
        assert client.post("/v1/batches/1/renew", json=token).status_code == 200
        assert client.post("/v1/batches/1/ack", json=token).status_code == 200


# ---- files


def refusal(folder: Path, database: Path) -> str:
    """What a hub says that does not start."""
    refused = HubProcess(folder, database=database)
    command = [sys.executable, "-m", "treadle", "hub", "--port", str(refused.port), "--database", str(database)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert (ended.returncode, "Traceback" in ended.stderr) == (2, False), ended.stderr
    return ended.stderr


def test_a_second_hub_on_the_same_file_is_refused_and_the_first_goes_on(hub: HubProcess, tmp_path: Path):
    with prepared(hub) as client:
        message = refusal(tmp_path, hub.database)
        assert f"is in use by another hub, process {hub.process.pid}" in message
        assert "--database" in message
        assert client.post("/scored_data", json=group(1)).status_code == 200


def test_a_hub_whose_file_is_deleted_says_so_and_ends_with_an_error(hub: HubProcess, tmp_path: Path):
    with prepared(hub) as client:
        assert client.post("/scored_data", json=group(1)).status_code == 200
        hub.database.unlink()
        answers = [client.post("/scored_data", json=group(2)), client.get("/healthz")]
        assert [answer.status_code for answer in answers] == [503, 503]
        assert all(f"{hub.database} was deleted" in answer.json()["detail"] for answer in answers)
        assert hub.wait() == 1
    assert f"treadle: {hub.database} was deleted or moved while the hub used it" in hub.log
    assert "Traceback" not in hub.log
    assert "--fresh" in refusal(tmp_path, hub.database), "a restart does not go on with an empty queue"


def test_a_database_in_memory_is_refused_with_a_sentence(tmp_path: Path):
    assert "':memory:' is not the path of a file" in refusal(tmp_path, Path(":memory:"))


def test_a_file_of_another_release_is_refused_with_a_sentence(hub: HubProcess, tmp_path: Path):
    with prepared(hub):
        hub.stop()
    with sqlite3.connect(hub.database) as db:
        db.execute("PRAGMA user_version = 99")
    message = refusal(tmp_path, hub.database)
    assert "has schema version 99" in message
    assert "the newer release that wrote it" in message


def test_a_rotten_log_is_refused_by_name(hub: HubProcess, tmp_path: Path):
    with prepared(hub) as client:
        for tag in range(5):
            client.post("/scored_data", json=group(tag, 3000))
        hub.end()
    log = Path(f"{hub.database}-wal")
    content = bytearray(log.read_bytes())
    content[len(content) // 2] ^= 4
    log.write_bytes(content)
    message = refusal(tmp_path, hub.database)
    assert f"{hub.database}-wal is damaged" in message
    assert f"delete {hub.database}.progress" in message


def test_a_damaged_group_is_set_aside_and_trainers_continue(hub: HubProcess):
    with prepared(hub) as client:
        client.post("/scored_data_list", json=[group(tag, 3000) for tag in range(7001, 7009)])
        hub.stop()
    content = hub.database.read_bytes()
    for tag in (b'"tokens":[[7001,1,', b'"tokens":[[7005,1,'):
        assert content.count(tag) == 1
        content = content.replace(tag, tag.replace(b",1,", b",3,"))
    hub.database.write_bytes(content)
    hub.start()
    with hub.client() as client:
        lease = {"step": 1, "holder": "t"}
        batch = client.post("/v1/lease", json=lease).json()["batch"]
        assert tags_of(batch["groups"]) == [7002, 7003]
        assert client.post("/v1/batches/1/ack", json={"token": batch["token"]}).status_code == 200
        batches = [client.get("/batch").json()["batch"] for _ in range(3)]
        assert [tags_of(batch or []) for batch in batches] == [[7004, 7006], [7007, 7008], []]
        dead = client.get("/v1/dead-letters").json()["dead_letters"]
        assert [(each["id"], each["reason"]) for each in dead] == [(5, "damaged"), (1, "damaged")]
        assert client.get("/v1/status").json()["step"] == 3
    assert "groups_damaged" in hub.log


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MiB, where this account may make one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "none", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("file systems can only be made by the administrator")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_is_reported_and_the_hub_recovers_when_space_is_freed(tmp_path: Path, small_disk: Path):
    filler = small_disk / "filler"
    filler.write_bytes(bytes(4 * 2**20))
    hub = HubProcess(tmp_path, "--validation-workers", "1", database=small_disk / "hub.sqlite")
    try:
        accepted: list[int] = []
        with prepared(hub) as client:
            answers = []
            for tag in range(1, 400):
                answer = client.post("/scored_data", json=group(tag, 10_000))
                answers.append(answer.status_code)
                if answer.status_code == 200:
                    accepted.append(tag)
                if answers[-5:] == [507] * 5:
                    break
            assert set(answers) == {200, 507}, answers
            assert "disk" in answer.json()["detail"]
            assert client.get("/healthz").status_code == 200
            assert client.get("/v1/status").json()["queued_groups"] == len(accepted)
            hub.end()
            assert f"the disk of {hub.database} is full" in refusal(tmp_path, hub.database)
            filler.unlink()
            hub.start()
            for tag in (1001, 1002):
                assert client.post("/scored_data", json=group(tag, 10_000)).status_code == 200
            accepted += [1001, 1002]
            served: list[int] = []
            trainer = Trainer(hub)
            while trainer.train_one(client):
                served += trainer.trained[trainer.step]
        assert served == accepted[: len(served)]
        assert len(served) >= len(accepted) - 1
        assert "internal_error" not in hub.log
    finally:
        hub.end()


# ---- helpers that die


def test_killing_a_worker_fails_no_request_of_sixteen_clients(hub: HubProcess):
    with prepared(hub) as client:

        def post(tag: int) -> int:
            with hub.client() as own:
                return own.post("/scored_data", json=group(tag, 20_000)).status_code

        (victim,) = wait_for_workers(hub)
        with ThreadPoolExecutor(16) as pool:
            posts = [pool.submit(post, tag) for tag in range(1, 65)]
            while client.get("/v1/status").json()["queued_groups"] < 8:
                time.sleep(0.005)
            os.kill(victim, signal.SIGKILL)
            assert [each.result() for each in posts] == [200] * 64
        assert client.get("/v1/status").json()["queued_groups"] == 64
        replaced = wait_for_workers(hub)
        assert len(replaced) == 1
        assert victim not in replaced
    assert "validation_worker_died" in hub.log
    assert hub.stop()[0] == 0


def test_a_body_that_kills_every_worker_is_refused_and_the_hub_survives(hub: HubProcess):
    with prepared(hub) as client:
        (idle,) = wait_for_workers(hub)
        client.post("/scored_data", json=group(3, 20_000))  # it has begun its work
        much = memory_bytes(idle) + 60 * 2**20  # as the system does it when memory runs out: who grows, goes
        done = threading.Event()
        killed: set[int] = set()

        def kill_who_grows() -> None:
            while not done.is_set():
                for worker in workers_of(hub):
                    if memory_bytes(worker) > much:
                        os.kill(worker, signal.SIGKILL)
                        killed.add(worker)
                time.sleep(0.005)

        killer = threading.Thread(target=kill_who_grows)
        killer.start()
        try:
            answer = client.post("/scored_data", json=group(1, 4_000_000))
        finally:
            done.set()
            killer.join()
        assert (answer.status_code, len(killed)) == (413, 2)
        assert client.post("/scored_data", json=group(2, 20_000)).json() == {"status": "received"}
        assert client.get("/v1/status").json()["queued_groups"] == 2
    assert hub.stop()[0] == 0


def memory_bytes(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):  # it has just ended
        return 0


def wait_for_workers(hub: HubProcess) -> list[int]:
    until_s = time.monotonic() + 20
    while not workers_of(hub) and time.monotonic() < until_s:
        time.sleep(0.01)
    return workers_of(hub)
