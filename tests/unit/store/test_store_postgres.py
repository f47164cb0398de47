"""What only the store on PostgreSQL does: refusals with their remedy, several hubs, a server that restarts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import wait
from pathlib import Path

import msgspec
import psycopg
import pytest

from tests.postgres_server import PASSWORD, PostgresServer, cut_connections, rows_of
from treadle.config.files import NOT_STORED, without_secrets
from treadle.config.load import parse
from treadle.config.schema import HubConfig
from treadle.errors import ConfigError
from treadle.hub.presence import GONE_AFTER_S, Presence
from treadle.net.address import shown_store
from treadle.store import HeldByAnother, Limits, NewGroup, Post, ReadFailed, StorageFailed, groups, postgres, runs
from treadle.store import postgres_connection as connections
from treadle.store.choice import check_store, open_recorded, open_store
from treadle.store.postgres import PostgresStore
from treadle.watch.waits import Waits
from treadle.wire.hub import RegisterEnv, RegisterTrainer

LIMITS = Limits(groups=10_000)


@pytest.fixture
def url(postgres: PostgresServer) -> str:
    return postgres.new_database()


def new_group(tag: int) -> NewGroup:
    return NewGroup(payload=b'{"tag":%d}' % tag, size=2, num_tokens=8)


def refusal(url: str) -> str:
    with pytest.raises(ConfigError) as refused:
        PostgresStore.open(url)
    return str(refused.value)


# ---- refusals


def test_a_wrong_password_is_refused_with_the_remedy_and_not_shown(url: str):
    said = refusal(url.replace(PASSWORD, "wr0ng"))
    assert "password authentication failed" in said
    assert "PGPASSWORD" in said
    assert "wr0ng" not in said


def test_a_server_that_is_not_there_is_named_with_the_remedy(url: str):
    said = refusal("postgresql://hub:s3cret@127.0.0.1:9/run")
    assert "postgresql://127.0.0.1:9/run cannot be opened" in said
    assert "pg_isready" in said
    assert PASSWORD not in said


def test_a_database_that_does_not_exist_is_named(url: str):
    said = refusal(url.rpartition("/")[0] + "/nowhere")
    assert 'database "nowhere" does not exist' in said
    assert "createdb" in said


def test_a_queue_of_another_version_is_refused_with_a_sentence(url: str):
    PostgresStore.open(url).close()
    rows_of(url, "UPDATE about SET schema_version = 99")
    said = refusal(url)
    assert "has schema version 99; this release reads version 4" in said
    assert "newer release" in said


def test_a_schema_of_another_program_is_refused_and_left_alone(url: str):
    rows_of(url, "CREATE SCHEMA treadle; CREATE TABLE treadle.theirs (x BIGINT)")
    assert "a schema 'treadle' of another program" in refusal(url)
    assert rows_of(url, "SELECT count(*) FROM theirs") == [(0,)]


def test_without_psycopg_the_package_to_install_is_named(tmp_path: Path, url: str):
    hidden = "import sys; sys.modules['psycopg'] = None; from treadle.cli import main; sys.exit(main())"
    ended = subprocess.run(
        [sys.executable, "-c", hidden, "hub", "--port", "1", "--store", url],
        capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert ended.returncode == 2
    assert 'pip install "treadle[postgres]"' in ended.stderr


@pytest.mark.parametrize(
    "wrong",
    ["mysql://hub:s3cret@db/run", "postgresql://hub:s3cret@db", "postgresql://hub@db/run?password=s3cret", "q.sqlite"],
)
def test_an_invalid_address_is_refused_without_showing_a_password(wrong: str):
    with pytest.raises(ConfigError, match="postgresql://USER:PASSWORD@HOST") as refused:
        parse(HubConfig, {"store": wrong}, source="the command line")
    assert PASSWORD not in str(refused.value)


@pytest.mark.parametrize("password", ["pa%s3cret", "pa/s3cret", "pa?s3cret", "pa#s3cret", "pa@s3cret", "s3cret%zz"])
def test_a_password_that_needs_escapes_is_refused_and_not_shown(password: str):
    url = f"postgresql://hub:{password}@db/run"
    with pytest.raises(ConfigError, match="%25 %2F %3F %23 %40") as refused:
        parse(HubConfig, {"store": url}, source="the command line")
    shown = [str(refused.value), shown_store(url), str(without_secrets({"hub": {"store": url}}))]
    assert [text for text in shown if PASSWORD in text] == []


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql://hub:p%40s%2Fs:3@db.example:5433/run?sslmode=require", "postgresql://db.example:5433/run"),
        ("postgres://hub@[::1],db2/run", "postgres://[::1],db2/run"),
        ("postgresql:///run?host=/var/run/postgresql&user=hub", "postgresql:///run"),
    ],
)
def test_addresses_of_libpq_are_taken_and_shown_without_the_user(url: str, shown: str):
    assert parse(HubConfig, {"store": url}, source="the command line").store == url
    assert shown_store(url) == shown


def test_an_address_that_libpq_cannot_parse_is_refused_without_quoting_it():
    assert "not followed by two hexadecimal digits" in (said := refusal("postgresql://hub:s3cret%zz@127.0.0.1:9/run"))
    assert PASSWORD not in said


# ---- one queue, several hubs


def test_two_hubs_share_groups_leases_and_steps(url: str, trainer: RegisterTrainer, terms):
    with PostgresStore.open(url) as first, PostgresStore.open(url) as second:
        first.register_trainer(trainer).result()
        second.append(Post([new_group(0), new_group(1)], key="k", body_hash=b"h"), LIMITS).result()
        assert first.append(Post([new_group(0)], key="k", body_hash=b"h"), LIMITS).result().duplicate
        lease = first.lease(1, "a", terms).result()
        with pytest.raises(HeldByAnother):
            second.lease(1, "b", terms).result()
        second.renew(1, lease.token, 60.0).result()
        second.ack(1, lease.token).result()
        assert first.read(runs.read_run).current_step == 1


def test_hubs_that_write_at_once_store_everything_once_and_in_order(url: str):
    with PostgresStore.open(url) as first, PostgresStore.open(url) as second:
        futures = [
            store.append(Post([new_group(tag)], key=f"k{tag}", body_hash=b"h"), LIMITS)
            for tag in range(100)
            for store in (first, second)
        ]
        wait(futures, timeout=60)
        assert sum(not future.result().duplicate for future in futures) == 100
        assert first.read(groups.counts).queued.groups == second.read(groups.counts).queued.groups == 100
        events = second.read(runs.events_after, 0, limit=1000)
        assert [event.id for event in events] == list(range(1, 101)), "without holes"


def test_leases_last_over_the_restart_of_a_hub(url: str, clock, trainer: RegisterTrainer, terms):
    with PostgresStore.open(url, clock=clock) as store:
        store.register_trainer(trainer).result()
        store.append(Post([new_group(0), new_group(1)]), LIMITS).result()
        held = store.lease(1, "a", terms).result()
    with PostgresStore.open(url, clock=clock) as store:
        with pytest.raises(HeldByAnother):
            store.lease(1, "b", terms).result()
        clock.now_s += 61
        assert store.lease(1, "b", terms).result().group_ids == held.group_ids


def test_only_the_first_hub_makes_environments_wait_for_the_trainer(url: str, trainer: RegisterTrainer, terms):
    with PostgresStore.open(url) as first:
        first.register_trainer(trainer).result()
        first.lease(1, "a", terms).result()
        with PostgresStore.open(url) as second:
            assert second.read(runs.read_run).started
    with PostgresStore.open(url) as again:
        assert not again.read(runs.read_run).started


@pytest.mark.parametrize("is_gone", [False, True], ids=["a new name", "a name of before"])
def test_environments_of_one_name_at_two_hubs_get_two_ids(url: str, clock, is_gone: bool):
    with PostgresStore.open(url) as first, PostgresStore.open(url) as second:
        presences = [Presence(clock, list, lambda _: None) for _ in range(2)]
        env = RegisterEnv(max_token_length=10, desired_name="gsm8k", weight=1.0, group_size=4)

        def register(place: int) -> int:
            record = (first, second)[place].write(
                runs.register_env, env, resume=False, idle_s=presences[place].idle_s, gone_after_s=GONE_AFTER_S,
                has_other_hubs=True,
            ).result()  # fmt: skip
            presences[place].mark(record.env_id)
            return record.env_id

        if is_gone:
            register(0)
            presences[1].mark(0)
            rows_of(url, "UPDATE events SET at = at - 60")
        clock.now_s += 60
        assert [register(0), register(1)] == [0, 1], "neither hub knows of the other"


def test_fresh_renames_the_queue_unless_another_hub_uses_it(url: str):
    with PostgresStore.open(url) as store:
        store.append(Post([new_group(0)]), LIMITS).result()
        with pytest.raises(ConfigError, match="in use by another hub"):
            PostgresStore.open(url, fresh=True)
    with PostgresStore.open(url, fresh=True) as store:
        assert store.read(groups.counts).accepted_groups == 0
    ((earlier,),) = rows_of(url, "SELECT nspname FROM pg_namespace WHERE nspname LIKE 'treadle\\_%'")
    assert rows_of(url, f"SELECT count(*) FROM {earlier}.groups") == [(1,)]  # noqa: S608


# ---- lost connections


def test_a_change_whose_connection_was_cut_is_made_once(url: str):
    with PostgresStore.open(url) as store:
        for tag in range(20):
            future = store.append(Post([new_group(tag)]), LIMITS)  # without a key: a repeat would be stored again
            if tag % 4 == 0:
                cut_connections(url)
            future.result(timeout=60)
        assert store.read(groups.counts).accepted_groups == 20


def test_a_cut_during_the_commit_is_resolved_by_asking_the_server(url: str):
    with PostgresStore.open(url) as store:
        session = store._sessions.writing
        store.append(Post([new_group(0)]), LIMITS).result()
        real = session._db.db

        class CutAfterCommit:
            """The server commits, and its answer is lost."""

            def __getattr__(self, name):
                return getattr(real, name)

            def execute(self, sql, *parameters):
                answer = real.execute(sql, *parameters)
                if sql == b"COMMIT":
                    real.close()
                    return real.execute(sql)  # raises
                return answer

        session._db.db = CutAfterCommit()
        store.append(Post([new_group(1)]), LIMITS).result(timeout=60)
        assert store.read(groups.counts).accepted_groups == 2
        assert rows_of(url, "SELECT num_commits FROM commits") == [(2,)]


def test_a_commit_that_the_server_did_not_see_is_repeated(url: str):
    with PostgresStore.open(url) as store:
        session = store._sessions.writing
        real = session._db.db

        class CutBeforeCommit:
            def __getattr__(self, name):
                return getattr(real, name)

            def execute(self, sql, *parameters):
                if sql == b"COMMIT":
                    real.close()
                return real.execute(sql, *parameters)

        session._db.db = CutBeforeCommit()
        store.append(Post([new_group(1)]), LIMITS).result(timeout=60)
        assert store.read(groups.counts).accepted_groups == 1


def test_a_hub_that_starts_keeps_what_others_ask_about_their_commits(url: str, monkeypatch: pytest.MonkeyPatch):
    connect_again = postgres._Listener._connect_again
    with PostgresStore.open(url) as store:
        session = store._sessions.writing
        real = session._db.db

        class RestartAfterCommit:
            def __getattr__(self, name):
                return getattr(real, name)

            def execute(self, sql, *parameters):
                answer = real.execute(sql, *parameters)
                if sql == b"COMMIT":
                    cut_connections(url)
                    PostgresStore.open(url).close()  # before the listener of the first hub holds its lock again
                    is_started.set()
                    return real.execute(sql)  # raises
                return answer

        is_started = threading.Event()
        monkeypatch.setattr(
            postgres._Listener, "_connect_again", lambda listener: is_started.wait(20) and connect_again(listener)
        )
        session._db.db = RestartAfterCommit()
        store.append(Post([new_group(1)]), LIMITS).result(timeout=60)
        assert store.read(groups.counts).accepted_groups == 1


def test_changes_that_wait_for_a_lost_server_fail_together(url: str, monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: object, **__: object) -> None:
        raise psycopg.OperationalError("connection refused")

    monkeypatch.setattr(connections, "RECONNECT_S", 0.3)
    with PostgresStore.open(url) as store:
        gate = threading.Event()
        store.write(lambda _: gate.wait(9))
        with monkeypatch.context() as away:
            away.setattr(connections, "connect", refuse)
            cut_connections(url)
            began_s = time.monotonic()
            futures = [store.append(Post([new_group(tag)]), LIMITS) for tag in range(100)]
            gate.set()
            assert all(isinstance(future.exception(timeout=60), StorageFailed) for future in futures)
            assert time.monotonic() - began_s < 5.0, "each waited for itself"
        store.append(Post([new_group(1)]), LIMITS).result(timeout=60)
        assert store.read(groups.counts).accepted_groups == 1


def test_a_silent_server_holds_up_a_read_only_for_a_moment(url: str, monkeypatch: pytest.MonkeyPatch):
    for module in (postgres, connections):
        monkeypatch.setattr(module, "READ_S", 0.3)
    with PostgresStore.open(url) as store:
        frozen = store._sessions.reading._db.db.info.backend_pid
        os.kill(frozen, signal.SIGSTOP)
        try:
            began_s = time.monotonic()
            with pytest.raises(ReadFailed):
                store.read(runs.read_run)
            assert time.monotonic() - began_s < 5.0
            while True:  # on another connection
                try:
                    assert store.read(runs.read_run).current_step == 0
                    break
                except ReadFailed:
                    assert time.monotonic() - began_s < 20.0
                    time.sleep(0.05)
        finally:
            os.kill(frozen, signal.SIGCONT)


def test_the_server_notices_that_the_machine_of_a_hub_is_gone(url: str):
    names = ("tcp_keepalives_idle", "tcp_keepalives_interval", "tcp_keepalives_count", "tcp_user_timeout")
    db = connections.connect(url)
    assert [db.execute("SELECT current_setting(?)", (name,)).fetchone()[0] for name in names] == [
        "10", "5", "3", "20000",
    ]  # fmt: skip
    db.close()


# ---- by the settings of a hub


def test_a_recorded_queue_is_read_without_a_hub(url: str, trainer: RegisterTrainer):
    config = HubConfig(store=url)
    with pytest.raises(ConfigError, match="has no queue"):
        open_recorded(config, Path())
    with open_store(config, Waits(), lambda: None) as store:
        store.append(Post([new_group(7)]), LIMITS).result()
    with open_recorded(config, Path()) as browser:
        assert msgspec.json.decode(browser.contents([1])[1].payload) == {"tag": 7}


def test_a_password_that_was_not_stored_comes_from_the_environment(url: str, monkeypatch: pytest.MonkeyPatch):
    saved = HubConfig(store=url.replace(PASSWORD, NOT_STORED))
    with pytest.raises(ConfigError, match="PGPASSWORD"):
        check_store(saved)
    monkeypatch.setenv("PGPASSWORD", PASSWORD)
    check_store(saved)
