"""Connections to PostgreSQL: open them with errors in words, read, write, and go on after the server was restarted.

One hub at a time writes: a transaction begins by locking the one row of the table `run`. Which groups make a batch
depends on the whole queue, and the ids of events must become visible in order, so parallel writers would have to wait
for each other in any case. Each transaction carries the jobs of many requests (store/commit_thread.py).
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any, TypeVar
from urllib.parse import urlsplit

import psycopg
from psycopg import errors
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from treadle.config.files import NOT_STORED
from treadle.errors import ConfigError, DiskFull, TreadleError
from treadle.log import get_logger
from treadle.net.address import shown_store
from treadle.store.connection import Connection, Rows, transact
from treadle.store.records import OutcomeUnknown, ReadFailed, StorageFailed

T = TypeVar("T")
SCHEMA = "treadle"
CHANNEL = "treadle"  # of NOTIFY; the payload is the hub process that committed
CONNECT_S = 5
RECONNECT_S = 15.0  # a change waits this long for the server to come back; its caller tries again after that
PAUSE_S = 0.1
READ_AGAIN_S = 1.0  # after a server was not reached: reads must not hold up the event loop
FROZEN_S = 10  # the server ends the transaction of a hub that is stopped or cut off, so that the others go on
# Of libpq; what the URL says wins. A connection to a machine that is gone is noticed within half a minute.
_DEFAULTS: dict[str, Any] = {
    "application_name": "treadle hub",
    "connect_timeout": CONNECT_S,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 20_000,
    "target_session_attrs": "read-write",
}
_SETTINGS = f"""
SET search_path TO {SCHEMA};
SET idle_in_transaction_session_timeout = '{FROZEN_S}s';
SELECT set_config('synchronous_commit', 'on', false) WHERE current_setting('synchronous_commit') = 'off';
"""
_FIXES = {
    "password authentication failed": "correct the user or the password in --store, in PGPASSWORD or in ~/.pgpass",
    "no password supplied": "give the password: postgresql://USER:PASSWORD@HOST/NAME, PGPASSWORD or ~/.pgpass",
    "does not exist": "create it (createdb, createuser), or correct the names in --store",
    "no pg_hba.conf entry": "allow this user and machine in the server's pg_hba.conf",
    "too many clients": "raise the server's max_connections: a hub uses up to six",
    "remaining connection slots": "raise the server's max_connections: a hub uses up to six",
    "could not translate host name": "correct the host in --store",
    "failed to resolve host": "correct the host in --store",
}
# The server announces that it ends the connection, was demoted to a standby, or could not run this beside others.
_TEMPORARY = (
    errors.AdminShutdown,
    errors.CrashShutdown,
    errors.CannotConnectNow,
    errors.IdleInTransactionSessionTimeout,
    errors.ReadOnlySqlTransaction,
    errors.SerializationFailure,
    errors.DeadlockDetected,
)
log = get_logger("store")


def connect(url: str) -> PostgresConnection:
    """A connection in autocommit mode, in our schema. Raises psycopg.OperationalError."""
    given = conninfo_to_dict(url)
    if given.get("password") == NOT_STORED:  # the settings of an earlier run: PGPASSWORD or ~/.pgpass may have it
        del given["password"]
    db = psycopg.connect(make_conninfo(**(_DEFAULTS | given)), autocommit=True)
    db.execute(_SETTINGS.encode())
    return PostgresConnection(db)


def first_connection(url: str) -> PostgresConnection:
    """The same for a hub that starts: an error is a sentence with its remedy."""
    try:
        return connect(url)
    except psycopg.Error as error:
        server = str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__
        where = urlsplit(url).netloc.rpartition("@")[2] or "this machine"
        default = f"see whether the server runs there (pg_isready), or correct --store; the address is {where}"
        fix = next((fix for words, fix in _FIXES.items() if words in str(error)), default)
        raise ConfigError(f"the queue {shown_store(url)} cannot be opened: {server}", fix=fix) from error


@lru_cache(maxsize=512)
def _statement(sql: str) -> bytes:
    return sql.replace("%", "%%").replace("?", "%s").encode()


class PostgresConnection:
    """`Connection` of store/connection.py."""

    ids_in = "(SELECT CAST(value AS BIGINT) FROM json_array_elements_text(CAST(? AS JSON)))"
    for_update = " FOR UPDATE"

    def __init__(self, db: psycopg.Connection[tuple[Any, ...]]) -> None:
        self.db = db
        self.num_changes = 0

    @property
    def is_lost(self) -> bool:
        return self.db.closed

    def execute(self, sql: str, parameters: Sequence[Any] = (), /) -> Rows:
        rows = self.db.execute(_statement(sql), parameters)
        if not sql.startswith("SELECT"):
            self.num_changes += max(0, rows.rowcount)
        return rows

    @contextlib.contextmanager
    def snapshot(self) -> Iterator[None]:
        self.db.execute(b"BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
        try:
            yield
        finally:
            self.roll_back()

    def roll_back(self) -> None:
        with contextlib.suppress(psycopg.Error):  # a lost connection has nothing to undo
            self.db.execute(b"ROLLBACK")

    def is_damage(self, error: Exception) -> bool:
        return False  # PostgreSQL ends the whole snapshot with the error; our checksums detect damaged contents

    def close(self) -> None:
        self.db.close()


def _is_away(db: PostgresConnection, error: Exception) -> bool:
    """Whether another attempt, maybe on another connection, can succeed."""
    return isinstance(error, psycopg.Error) and (db.is_lost or isinstance(error, _TEMPORARY))


class PostgresWriteSession:
    """`WriteSession` of store/connection.py, for one hub process."""

    def __init__(self, url: str, db: PostgresConnection, process: str) -> None:
        self._url = url
        self._db = db
        self._process = process
        self._num_commits = 0
        self._changes_before = 0

    @property
    def db(self) -> Connection:
        return self._db

    @property
    def num_changes(self) -> int:
        return self._db.num_changes

    def begin(self) -> None:
        self._db.db.execute(b"BEGIN; SELECT FROM run FOR UPDATE")
        self._changes_before = self._db.num_changes

    def commit(self) -> None:
        """The other hubs are notified. When the connection is lost meanwhile, ask the server what became of it."""
        if self._db.num_changes == self._changes_before:
            self._db.db.execute(b"COMMIT")
            return
        self._num_commits += 1
        self._db.execute(
            "INSERT INTO commits (process, num_commits) VALUES (?, ?)"
            " ON CONFLICT (process) DO UPDATE SET num_commits = excluded.num_commits"
            " RETURNING pg_notify(?, process)",
            (self._process, self._num_commits, CHANNEL),
        )
        try:
            self._db.db.execute(b"COMMIT")
        except psycopg.Error as error:
            if not self._was_committed(error):
                raise

    def _was_committed(self, error: psycopg.Error) -> bool:
        """Ask until the answer is known: jobs of unknown outcome must not run again."""
        is_lost = _is_away(self._db, error)
        while self.recovers_from(error):
            try:
                return self._is_committed()
            except psycopg.Error as another:
                error = another
        if is_lost:
            raise OutcomeUnknown(
                "the PostgreSQL server was lost while it stored this: it may be stored or not"
            ) from error
        return False

    def _is_committed(self) -> bool:
        """The lock is granted only once the server has ended the transaction of the lost connection."""
        try:
            self.begin()
            row = self._db.execute("SELECT num_commits FROM commits WHERE process = ?", (self._process,)).fetchone()
        finally:
            self._db.roll_back()
        return row is not None and int(row[0]) == self._num_commits

    def rollback(self) -> None:
        self._db.roll_back()

    def find_trouble(self) -> str:
        return ""  # PostgreSQL itself ends when it can no longer store anything safely

    def recovers_from(self, error: Exception) -> bool:
        """Connect again, for a while; a transaction that another one was in the way of can simply be repeated."""
        if not _is_away(self._db, error):
            return False
        log.warning("database_lost", why=type(error).__name__)
        until_s = time.monotonic() + RECONNECT_S
        while True:
            self._db.close()
            try:
                self._db = connect(self._url)
                log.info("database_is_back")
                return True
            except psycopg.OperationalError:
                if time.monotonic() > until_s:
                    return False
                time.sleep(PAUSE_S)

    def makes_unsafe(self, error: Exception) -> bool:
        return False

    def in_words(self, error: Exception) -> Exception:
        if isinstance(error, TreadleError):
            return error
        if not isinstance(error, psycopg.Error):
            log.error("job_failed", exc_info=True)  # called while it is handled
            return error
        if isinstance(error, errors.DiskFull):
            log.error("disk_full")
            fix = "free some space; nothing that was accepted is lost"
            return DiskFull("the disk of the PostgreSQL server is full", fix=fix)
        log.error("write_failed", kind=type(error).__name__, why=str(error).splitlines()[:1])
        return StorageFailed("the queue could not be written: the PostgreSQL server does not answer or refused it")

    def after_commit(self, num_jobs: int, num_bytes: int) -> None:
        pass  # the server does its upkeep itself

    def close(self) -> None:
        self._db.close()


class PostgresReadSession:
    """`ReadSession` and `IndexSession` of store/connection.py."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._db = first_connection(url)
        self._lock = threading.Lock()
        self._failed_s = -READ_AGAIN_S  # when the server was last not reached

    def read(self, query: Callable[[Connection], T]) -> T:
        """A lost connection is opened again at once; a server that was just not reached is not asked again yet."""
        with self._lock:
            try:
                try:
                    return query(self._db)
                except psycopg.Error as error:
                    if not _is_away(self._db, error) or time.monotonic() - self._failed_s < READ_AGAIN_S:
                        raise
                    self._connect_again()
                    return query(self._db)
            except psycopg.Error as error:
                log.error("read_failed", kind=type(error).__name__, why=str(error).splitlines()[:1])
                raise ReadFailed("the queue cannot be read: the PostgreSQL server does not answer") from error

    def _connect_again(self) -> None:
        try:
            self._db = connect(self._url)
        except psycopg.OperationalError:
            self._failed_s = time.monotonic()
            raise

    def change(self, job: Callable[[Connection], T]) -> T:
        return self.read(lambda db: transact(db, job))

    def close(self) -> None:
        with self._lock:
            self._db.close()
