"""What only the store on PostgreSQL does: refusals with their remedy, several hubs, a server that restarts."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import wait
from pathlib import Path

import msgspec
import pytest

from tests.postgres_server import PASSWORD, PostgresServer, cut_connections, rows_of
from treadle.config.files import NOT_STORED
from treadle.config.load import parse
from treadle.config.schema import HubConfig
from treadle.errors import ConfigError
from treadle.store import HeldByAnother, Limits, NewGroup, Post, groups, runs
from treadle.store.choice import check_store, open_recorded, open_store
from treadle.store.postgres import PostgresStore
from treadle.watch.waits import Waits
from treadle.wire.hub import RegisterTrainer

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
