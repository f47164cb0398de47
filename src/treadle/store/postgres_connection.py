"""Connections to PostgreSQL: open them with errors in words, read, write, and go on after the server was restarted.

One hub at a time writes: a transaction begins by locking the one row of the table `run`. Which groups make a batch
depends on the whole queue, and the ids of events must become visible in order, so parallel writers would have to wait
for each other in any case. Each transaction carries the jobs of many requests (store/commit_thread.py).
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import lru_cache
from typing import Any, TypeVar, cast
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
READ_S = 2.0  # a read fails when the server is silent for this long: it may hold up the event loop
LONGEST_TURN_S = 0.3
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
-- The server notices a hub whose machine is gone, and releases its locks.
SET tcp_keepalives_idle = 10; SET tcp_keepalives_interval = 5; SET tcp_keepalives_count = 3;
SET tcp_user_timeout = '20s';
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


class _NotCommitted(psycopg.OperationalError):
    """The connection was lost during a commit, and the server has not stored it."""


class _Connection(psycopg.Connection[tuple[Any, ...]]):
    max_silence_s: float | None = None  # close it when an answer takes longer

    def wait(self, gen: Generator[Any, Any, T], *args: Any, **options: Any) -> T:
        return super().wait(self._watched(gen), *args, **options)

    def _watched(self, gen: Generator[Any, Any, T]) -> Generator[Any, Any, T]:
        """The same generator. psycopg sends it 0 several times per second while the socket is not ready."""
        silence_s, before_s = 0.0, time.monotonic()
        try:
            wanted = next(gen)
            while True:
                ready = yield wanted
                now_s = time.monotonic()
                # No turn counts for more: if this process itself was stopped, the answer may have arrived meanwhile.
                silence_s = 0.0 if ready else silence_s + min(now_s - before_s, LONGEST_TURN_S)
                before_s = now_s
                if self.max_silence_s is not None and silence_s > self.max_silence_s:
                    self.close()
                    raise psycopg.OperationalError(f"the server was silent for {self.max_silence_s:g} s")
                wanted = gen.send(ready)
        except StopIteration as done:
            return cast(T, done.value)


def connect(url: str, *, max_silence_s: float | None = None) -> PostgresConnection:
    """A connection in autocommit mode, in our schema. Raises psycopg.OperationalError."""
    given = conninfo_to_dict(url)
    if given.get("password") == NOT_STORED:  # the settings of an earlier run: PGPASSWORD or ~/.pgpass may have it
        del given["password"]
    db = _Connection.connect(make_conninfo(**(_DEFAULTS | given)), autocommit=True)
    db.max_silence_s = max_silence_s
    db.execute(_SETTINGS.encode())
    return PostgresConnection(db)


def first_connection(url: str, *, max_silence_s: float | None = None) -> PostgresConnection:
    """The same for a hub that starts: an error is a sentence with its remedy."""
    try:
        return connect(url, max_silence_s=max_silence_s)
    except psycopg.Error as error:
        server = str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__
        if "percent-encoded" in server:  # libpq quotes the password
            server = "a % in the URL is not followed by two hexadecimal digits"
        where = urlsplit(shown_store(url)).netloc or "this machine"
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

    def __init__(self, db: _Connection) -> None:
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
            if not _is_away(self._db, error):
                raise
            self._check_committed(error)

    def _check_committed(self, error: psycopg.Error) -> None:
        """Ask until the answer is known: jobs of unknown outcome must not run again."""
        while self.recovers_from(error):
            try:
                is_committed = self._is_committed()
            except psycopg.Error as another:
                error = another
                continue
            if not is_committed:
                raise _NotCommitted("the connection was lost before the commit") from error
            return
        raise OutcomeUnknown("the PostgreSQL server was lost while it stored this: it may be stored or not") from error

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
        if isinstance(error, _NotCommitted):
            return True
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

    def has_lost(self, error: Exception) -> bool:
        return isinstance(error, OutcomeUnknown) or (isinstance(error, psycopg.Error) and self._db.is_lost)

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

    def __init__(self, url: str, *, max_silence_s: float | None = None) -> None:
        """`max_silence_s`: a read fails when the server is silent for longer; None: it waits."""
        self._url = url
        self._max_silence_s = max_silence_s
        self._db = first_connection(url, max_silence_s=max_silence_s)
        self._lock = threading.Lock()
        self._is_closed = threading.Event()
        self._reconnect: threading.Thread | None = None

    def read(self, query: Callable[[Connection], T]) -> T:
        """A lost connection is opened again. That is waited for once, for at most READ_S with the failed query; later
        reads fail at once until the server is back."""
        with self._lock:
            until_s = time.monotonic() + READ_S
            try:
                try:
                    return query(self._db)
                except psycopg.Error as error:
                    if not _is_away(self._db, error) or not self._is_connected_again(until_s):
                        raise
                    return query(self._db)
            except psycopg.Error as error:
                log.error("read_failed", kind=type(error).__name__, why=str(error).splitlines()[:1])
                raise ReadFailed("the queue cannot be read: the PostgreSQL server does not answer") from error

    def _is_connected_again(self, until_s: float) -> bool:
        if self._reconnect is None or not self._reconnect.is_alive():
            self._db.close()
            self._reconnect = threading.Thread(target=self._connect_again, name="store-reader", daemon=True)
            self._reconnect.start()
            self._reconnect.join(max(0.0, until_s - time.monotonic()))
        return not self._db.is_lost

    def _connect_again(self) -> None:
        while not self._is_closed.is_set():
            try:
                db = connect(self._url, max_silence_s=self._max_silence_s)
            except psycopg.Error:
                self._is_closed.wait(PAUSE_S)
                continue
            self._db = db
            if self._is_closed.is_set():
                db.close()
            return

    def change(self, job: Callable[[Connection], T]) -> T:
        return self.read(lambda db: transact(db, job))

    def close(self) -> None:
        self._is_closed.set()
        with self._lock:
            self._db.close()
