from __future__ import annotations

import sqlite3
import threading
import time
from concurrent.futures import wait
from pathlib import Path

import pytest

from treadle.errors import ConfigError, DiskFull
from treadle.store import (
    KeyReused,
    Limits,
    NewGroup,
    Post,
    QueueFull,
    SqliteStore,
    StorageFailed,
    batches,
    database,
    groups,
    runs,
)
from treadle.store.commit_thread import CommitThread
from treadle.store.database import SqliteWriteSession
from treadle.watch.waits import Waits
from treadle.wire.hub import RegisterEnv


def group(size: int = 1, num_bytes: int = 2, env_id: int | None = None) -> NewGroup:
    return NewGroup(payload=b"{" + b" " * (num_bytes - 2) + b"}", size=size, num_tokens=size, env_id=env_id)


def test_the_file_is_only_the_owners(tmp_path: Path):
    path = tmp_path / "deep" / "hub.sqlite"
    with SqliteStore.open(path) as store:
        store.append(Post([group()]), Limits(9)).result()
        modes = {file.name: file.stat().st_mode & 0o777 for file in path.parent.iterdir()}
    assert set(modes.values()) == {0o600}, modes


def test_a_newer_schema_is_refused_with_a_sentence(tmp_path: Path):
    path = tmp_path / "hub.sqlite"
    SqliteStore.open(path).close()
    db = sqlite3.connect(path)
    db.execute("PRAGMA user_version = 99")
    db.close()
    with pytest.raises(ConfigError, match="schema version 99; this release reads version 4"):
        SqliteStore.open(path)


def test_everything_is_there_after_reopening(queue, trainer):
    with queue.open() as store:
        store.register_trainer(trainer).result()
        store.append(Post([group(2), group(3)], key="k", body_hash=b"h"), Limits(9)).result()
    with queue.open() as store:
        assert store.read(runs.read_run).trainer == trainer
        assert (store.read(groups.counts).queued.groups, store.read(groups.counts).queued.sequences) == (2, 5)
        assert store.append(Post([group()], key="k", body_hash=b"h"), Limits(9)).result().duplicate


def test_a_key_stands_for_one_body(store):
    assert not store.append(Post([group()], key="k", body_hash=b"1"), Limits(9)).result().duplicate
    repeated = store.append(Post([group()], key="k", body_hash=b"1"), Limits(9)).result()
    assert (repeated.duplicate, repeated.num_groups) == (True, 1)
    with pytest.raises(KeyReused):
        store.append(Post([group()], key="k", body_hash=b"2"), Limits(9)).result()
    assert store.read(groups.counts).accepted_groups == 1


def test_no_jump_of_the_clock_lets_a_retry_be_stored_twice(store, monkeypatch):
    store.append(Post([group()], key="k", body_hash=b"1"), Limits(9)).result()
    now = time.time()
    for jump_s in (365 * 24 * 3600.0, -365 * 24 * 3600.0):
        monkeypatch.setattr(time, "time", lambda jump_s=jump_s: now + jump_s)
        store.append(Post([group()], key=f"other {jump_s}", body_hash=b"2"), Limits(9)).result()
        assert store.append(Post([group()], key="k", body_hash=b"1"), Limits(9)).result().duplicate
    assert store.read(groups.counts).accepted_groups == 3


def test_the_queue_limit_holds_and_a_list_is_stored_whole_or_not_at_all(store):
    store.append(Post([group(), group()]), Limits(3)).result()
    with pytest.raises(QueueFull, match="2 groups wait"):
        store.append(Post([group(), group()], key="later"), Limits(3)).result()
    assert store.read(groups.counts).accepted_groups == 2
    store.append(Post([group()], key="later"), Limits(3)).result()
    assert store.append(Post([group()], key="later"), Limits(3)).result().duplicate


def test_a_full_disk_refuses_one_post_and_the_store_goes_on(tmp_path: Path):
    with SqliteStore.open(tmp_path / "hub.sqlite", max_bytes=300_000) as store:
        store.append(Post([group()]), Limits(99)).result()
        with pytest.raises(DiskFull):
            store.append(Post([group(num_bytes=500_000)]), Limits(99)).result()
        store.append(Post([group()]), Limits(99)).result()
        assert store.read(groups.counts).accepted_groups == 2


def test_a_post_too_large_for_the_disk_fails_alone(tmp_path: Path):
    with SqliteStore.open(tmp_path / "hub.sqlite", max_bytes=300_000) as store:
        gate = threading.Event()
        store._writer.submit(lambda _: gate.wait(5))  # holds the writer, so that the next three wait together
        posts = [Post([group()]), Post([group(num_bytes=500_000)]), Post([group()])]
        futures = [store.append(post, Limits(99)) for post in posts]
        gate.set()
        wait(futures, timeout=60)
        assert [type(future.exception()) for future in futures] == [type(None), DiskFull, type(None)]
        assert store.read(groups.counts).accepted_groups == 2


def test_posts_that_wait_together_share_one_commit(store):
    gate = threading.Event()
    store._writer.submit(lambda _: gate.wait(5))
    futures = [store.append(Post([group()], key=f"k{i % 20}"), Limits(99)) for i in range(40)]
    commits = []
    store.commit_watchers.append(lambda *_: commits.append(1))
    gate.set()
    appended = [future.result(timeout=60) for future in futures]
    assert sum(not each.duplicate for each in appended) == 20
    assert store.read(groups.counts).accepted_groups == 20
    assert len(commits) <= 3


def test_a_refused_job_undoes_only_itself(tmp_path: Path):
    db = database.connect(tmp_path / "x.sqlite")
    db.execute("CREATE TABLE t (x)")
    writer = CommitThread(SqliteWriteSession(db, lambda: ""), Waits(), database.DISK_WAIT, on_failure=lambda: None)
    gate = threading.Event()

    def spoil(connection: sqlite3.Connection) -> None:
        connection.execute("INSERT INTO t VALUES ('spoilt')")
        raise KeyReused("no")

    writer.submit(lambda _: gate.wait(5))
    kept = writer.submit(lambda connection: connection.execute("INSERT INTO t VALUES ('kept')").rowcount)
    refused = writer.submit(spoil)
    gate.set()
    assert kept.result(timeout=60) == 1
    assert isinstance(refused.exception(timeout=60), KeyReused)
    writer.close()
    assert db.execute("SELECT x FROM t").fetchall() == [("kept",)]


def test_after_a_failed_fsync_nothing_more_is_promised(tmp_path: Path):
    store = SqliteStore.open(tmp_path / "hub.sqlite")

    def fail(_: sqlite3.Connection) -> None:
        error = sqlite3.OperationalError("disk I/O error")
        error.sqlite_errorcode = sqlite3.SQLITE_IOERR_FSYNC
        raise error

    assert not store.failure
    assert isinstance(store._writer.submit(fail).exception(timeout=60), StorageFailed)
    with pytest.raises(StorageFailed, match="restart the hub"):
        store.append(Post([group()]), Limits(9)).result(timeout=60)
    assert "restart the hub" in store.failure


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path):
    with pytest.raises(ConfigError, match="cannot be opened"):
        SqliteStore.open(tmp_path)


def test_a_closed_store_refuses_instead_of_hanging(queue):
    store = queue.open()
    store.close()
    with pytest.raises(StorageFailed):
        store.append(Post([group()]), Limits(9)).result(timeout=60)


def test_envs_get_numbered_names_and_their_own_back(store):
    def register(resume: bool = False, idle_s: float = 0.0):
        env = RegisterEnv(max_token_length=8, desired_name="math", weight=None, group_size=2)
        return store.write(runs.register_env, env, resume=resume, idle_s=lambda _: idle_s, gone_after_s=10.0).result()

    assert [register().name, register().name] == ["math_0", "math_1"]
    store.append(Post([group(env_id=0), group(env_id=0), group(env_id=7)]), Limits(9)).result()
    back = register(idle_s=11.0)
    assert (back.env_id, back.name, back.groups_accepted) == (0, "math_0", 2)
    assert register(resume=True).env_id == 0


def test_a_reset_forgets_everything_but_uses_no_id_again(store, trainer, terms):
    store.register_trainer(trainer).result()
    store.append(Post([group(4)], key="k"), Limits(9)).result()
    store.lease(1, "a", terms).result()
    store.write(runs.reset).result()
    assert store.read(groups.counts).accepted_groups == 0
    assert store.read(runs.read_run).trainer is None
    assert not store.append(Post([group(4)], key="k"), Limits(9)).result().duplicate
    store.register_trainer(trainer).result()
    assert store.read(batches.plan_next, 4, terms).ids == [2]
