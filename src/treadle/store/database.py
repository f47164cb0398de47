"""The tables of the queue, and the connections of its SQLite form: open, prepare, check, read, write."""

from __future__ import annotations

import contextlib
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar
from uuid import uuid4

from treadle.errors import ConfigError, DiskFull, TreadleError
from treadle.faults import reach
from treadle.log import get_logger
from treadle.store.connection import Connection, transact
from treadle.store.records import ReadFailed, StorageFailed
from treadle.watch.waits import WaitSpec

# ---- tables

APPLICATION_ID = 0x74726564  # "tred": tells our files from other programs' SQLite files
SCHEMA_VERSION = 4  # of the tables, in SQLite and in PostgreSQL
BUSY_TIMEOUT_MS = 5000
PAGE_BYTES = 8192  # a group has a hundred kilobytes and more: fewer, larger pages write faster
CHECK_S = 0.5  # a hub must be ready soon: a very long queue is not checked to its end
CHECK_EVERY = 10_000  # steps of SQLite's between two looks at the clock
log = get_logger("store")
T = TypeVar("T")

# tally is kept by triggers, inside the transaction that changes a group. Counting is then a look at a few
# rows however long the queue is, and it can never disagree with the groups themselves.
#
# A group's content is in a table of its own: to change the state of a group must not rewrite its content.
TABLES = """
CREATE TABLE run (
    id INTEGER PRIMARY KEY CHECK (id = 1),
    trainer BLOB,                                -- JSON of the registration; NULL before it
    current_step INTEGER NOT NULL DEFAULT 0,
    started INTEGER NOT NULL DEFAULT 0,
    latest_format TEXT,                          -- the last group before a reset, which outlives it
    latest BLOB
) STRICT;
INSERT INTO run (id) VALUES (1);

CREATE TABLE identity (run_id TEXT NOT NULL) STRICT;  -- by which an environment that comes back knows its run

CREATE TABLE envs (
    env_id INTEGER PRIMARY KEY,
    name TEXT NOT NULL UNIQUE,
    desired_name TEXT NOT NULL,
    weight REAL NOT NULL,
    group_size INTEGER NOT NULL,
    max_token_length INTEGER NOT NULL,
    min_batch_allocation REAL,
    connected INTEGER NOT NULL DEFAULT 1,
    groups_accepted INTEGER NOT NULL DEFAULT 0
) STRICT;

CREATE TABLE posts (                             -- kept as long as the groups: a retry may come at any time
    key TEXT PRIMARY KEY,
    body_hash BLOB NOT NULL,
    num_groups INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

CREATE TABLE groups (
    id INTEGER PRIMARY KEY AUTOINCREMENT,        -- the order of arrival
    state TEXT NOT NULL DEFAULT 'queued' CHECK (state IN ('queued', 'leased', 'trained', 'dropped', 'dead')),
    env_id INTEGER,                              -- NULL: posted without one
    size INTEGER NOT NULL,
    num_tokens INTEGER NOT NULL,
    num_bytes INTEGER NOT NULL,                  -- of its content; 0 once that was pruned
    crc INTEGER NOT NULL,                        -- of all that the trainer gets: disks rot without a word
    policy_version INTEGER,
    item INTEGER,
    received_at REAL NOT NULL,
    aside_step INTEGER,                          -- dropped or dead: at which step, and why
    aside_reason TEXT,
    metrics BLOB
) STRICT;
CREATE INDEX groups_queued_size ON groups (env_id, size, id) WHERE state = 'queued';
CREATE INDEX groups_queued_version ON groups (policy_version) WHERE state = 'queued' AND policy_version IS NOT NULL;
CREATE INDEX groups_dead ON groups (id) WHERE state = 'dead';
CREATE INDEX groups_dropped ON groups (env_id, aside_reason) WHERE state = 'dropped';

CREATE TABLE payloads (
    id INTEGER PRIMARY KEY,                      -- of the group
    format TEXT NOT NULL CHECK (format IN ('json', 'binary')),
    body BLOB NOT NULL
) STRICT;

CREATE TABLE batches (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    step INTEGER NOT NULL,
    state TEXT NOT NULL DEFAULT 'open' CHECK (state IN ('open', 'trained', 'dead', 'superseded', 'pruned')),
    group_ids TEXT NOT NULL,                     -- JSON array, in the order of delivery
    deliveries INTEGER NOT NULL DEFAULT 0,
    token TEXT,                                  -- fencing token of the latest lease
    holder TEXT,                                 -- NULL: nobody holds it
    process TEXT,                                -- the hub process whose clock the deadline is on
    deadline_s REAL,
    formed_at REAL NOT NULL
) STRICT;
CREATE UNIQUE INDEX batches_of_step ON batches (step) WHERE state IN ('open', 'trained', 'pruned');
CREATE INDEX batches_open ON batches (step) WHERE state = 'open';
CREATE INDEX batches_trained ON batches (step) WHERE state = 'trained';
CREATE INDEX batches_superseded ON batches (id) WHERE state = 'superseded';
CREATE INDEX batches_held ON batches (holder) WHERE holder IS NOT NULL;

CREATE TABLE env_queues (                             -- how far each environment has come in the weighted order
    env TEXT PRIMARY KEY,
    tag REAL NOT NULL
) STRICT, WITHOUT ROWID;

CREATE TABLE events (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    at REAL NOT NULL,
    kind TEXT NOT NULL,
    data TEXT NOT NULL                           -- JSON object
) STRICT;

CREATE TABLE tally (
    state TEXT NOT NULL,
    env TEXT NOT NULL,                           -- the env id in digits, 'none' when there is none
    size INTEGER NOT NULL,
    groups INTEGER NOT NULL,
    bytes INTEGER NOT NULL,
    PRIMARY KEY (state, env, size)
) STRICT, WITHOUT ROWID;
"""
_TALLY = """
CREATE TRIGGER tally_insert AFTER INSERT ON groups BEGIN
    INSERT INTO tally VALUES (NEW.state, ifnull(CAST(NEW.env_id AS TEXT), 'none'), NEW.size, 1, NEW.num_bytes)
    ON CONFLICT DO UPDATE SET groups = groups + 1, bytes = bytes + excluded.bytes;
END;
CREATE TRIGGER tally_move AFTER UPDATE OF state, num_bytes ON groups BEGIN
    UPDATE tally SET groups = groups - 1, bytes = bytes - OLD.num_bytes
    WHERE state = OLD.state AND env = ifnull(CAST(OLD.env_id AS TEXT), 'none') AND size = OLD.size;
    INSERT INTO tally VALUES (NEW.state, ifnull(CAST(NEW.env_id AS TEXT), 'none'), NEW.size, 1, NEW.num_bytes)
    ON CONFLICT DO UPDATE SET groups = groups + 1, bytes = bytes + excluded.bytes;
END;
"""


class SqliteConnection(sqlite3.Connection):
    """`Connection` of store/connection.py."""

    ids_in = "(SELECT value FROM json_each(?))"
    for_update = ""  # a transaction that writes locks the whole file

    @contextlib.contextmanager
    def snapshot(self) -> Iterator[None]:
        self.execute("BEGIN")
        try:
            yield
        finally:
            self.execute("ROLLBACK")  # nothing was written; a commit would repeat what a damaged page has said

    def is_damage(self, error: Exception) -> bool:
        code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT)
        return isinstance(error, sqlite3.DatabaseError) and code & 0xFF == sqlite3.SQLITE_CORRUPT


def connect(path: Path, *, is_uri: bool = False) -> SqliteConnection:
    """A connection in autocommit mode: transactions are begun by hand."""
    db = sqlite3.connect(path, isolation_level=None, check_same_thread=False, factory=SqliteConnection, uri=is_uri)
    db.execute(f"PRAGMA busy_timeout = {BUSY_TIMEOUT_MS}")
    return db


def prepare(db: sqlite3.Connection, path: Path) -> None:
    """Create the tables in a file that has none yet, refuse a file that another version wrote, and turn the log on.

    The tables are created in one transaction before the log is used: the header of the file then says that it is a
    queue. From here on changes go through SQLite's log (WAL), and a commit returns after fsync.
    """
    (version,) = db.execute("PRAGMA user_version").fetchone()
    if version not in (0, SCHEMA_VERSION):
        age = "newer" if version > SCHEMA_VERSION else "older"
        raise ConfigError(
            f"{path} has schema version {version}; this release reads version {SCHEMA_VERSION}",
            fix=f"finish the run with the {age} release that wrote it, or choose another file with --database",
        )
    if version == 0:
        db.execute(f"PRAGMA page_size = {PAGE_BYTES}")
        db.execute("PRAGMA synchronous = OFF")  # turning the log on syncs the file
        db.executescript(
            f"BEGIN IMMEDIATE; PRAGMA application_id = {APPLICATION_ID};"
            f" PRAGMA user_version = {SCHEMA_VERSION}; {TABLES} {_TALLY}"
        )
        db.execute("INSERT INTO identity VALUES (?)", (uuid4().hex,))
        db.execute("COMMIT")
    db.execute("PRAGMA synchronous = FULL")
    db.execute("PRAGMA journal_mode = WAL")
    db.execute("PRAGMA wal_autocheckpoint = 0")  # the writer does it, when nobody waits for an answer


def find_damage(db: sqlite3.Connection) -> str | None:
    """What is wrong with the file, in words. The groups' content has checksums, which are looked at when it is read."""
    until_s = time.monotonic() + CHECK_S
    db.set_progress_handler(lambda: time.monotonic() > until_s, CHECK_EVERY)
    try:
        for table in ("run", "envs", "batches", "posts", "env_queues", "tally", "events", "groups"):
            for (result,) in db.execute(f"PRAGMA integrity_check('{table}')"):
                if result != "ok":
                    return f"table {table}: {result.strip().splitlines()[-1]}"
        (num_wrong,) = db.execute(_MISCOUNTED).fetchone()
        return "the groups are not those that were counted" if num_wrong else None
    except sqlite3.OperationalError as error:
        if error.sqlite_errorcode != sqlite3.SQLITE_INTERRUPT:
            raise
        log.info("checked_in_part", seconds=CHECK_S)
        return None
    finally:
        db.set_progress_handler(None, 0)


_MISCOUNTED = """
SELECT count(*) FROM (
    SELECT * FROM (
        SELECT state, ifnull(CAST(env_id AS TEXT), 'none'), size, count(*), sum(num_bytes) FROM groups GROUP BY 1, 2, 3
        UNION ALL SELECT state, env, size, groups, bytes FROM tally WHERE groups > 0
    ) GROUP BY 1, 2, 3, 4, 5 HAVING count(*) != 2
)
"""


# ---- sessions

DISK_PATIENCE_S = 20.0  # a longer commit is reported by the watchdog
DISK_WAIT = WaitSpec(
    "the disk to take what was posted",
    fix="look at the disk of --database: is it full, or far away, or does another program hold the file?",
    of="hub",
    holding="the answers to all who posted, asked for a batch or acknowledged one",
    deadline_s=DISK_PATIENCE_S,
)
FOLD_LOG_BYTES = 2 * 2**20  # a longer log is folded into the file after a commit; less at once stalls nobody for long
BYTES_PER_COMMIT = 128 * 1024  # pages of tables and indexes that any commit writes, about
# After a failed fsync the kernel may have dropped the pages and report success the next time. Nothing that is
# written from then on can be trusted to be on disk.
NO_LONGER_DURABLE = (sqlite3.SQLITE_IOERR_FSYNC, sqlite3.SQLITE_IOERR_DIR_FSYNC)


class SqliteWriteSession:
    """`WriteSession` of store/connection.py."""

    def __init__(self, db: SqliteConnection, look: Callable[[], str]) -> None:
        """`look` says what is wrong with the files of `db`, "" while nothing is."""
        self._db = db
        self._log_bytes = 0
        self.find_trouble = look

    @property
    def db(self) -> Connection:
        return self._db

    @property
    def num_changes(self) -> int:
        return self._db.total_changes

    def begin(self) -> None:
        self._db.execute("BEGIN IMMEDIATE")

    def commit(self) -> None:
        self._db.execute("COMMIT")

    def rollback(self) -> None:
        if self._db.in_transaction:  # SQLite itself rolls back on some errors, a full disk among them
            self._db.execute("ROLLBACK")

    def recovers_from(self, error: Exception) -> bool:
        return False

    def has_lost(self, error: Exception) -> bool:
        return False

    def makes_unsafe(self, error: Exception) -> bool:
        return getattr(error, "sqlite_errorcode", None) in NO_LONGER_DURABLE

    def in_words(self, error: Exception) -> Exception:
        if isinstance(error, TreadleError):
            return error
        if not isinstance(error, sqlite3.Error):
            log.error("job_failed", exc_info=True)  # called while it is handled
            return error
        if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL:
            log.error("disk_full")
            return DiskFull("the disk of the queue is full", fix="free some space; nothing that was accepted is lost")
        log.error("write_failed", kind=getattr(error, "sqlite_errorname", type(error).__name__))
        return StorageFailed("the queue could not be written")

    def after_commit(self, num_jobs: int, num_bytes: int) -> None:
        """Fold the log into the file once it is long."""
        self._log_bytes += BYTES_PER_COMMIT + num_bytes
        if self._log_bytes > FOLD_LOG_BYTES:
            reach("store:checkpoint")
            with contextlib.suppress(sqlite3.Error):  # all callers have their answer; it is tried again later
                self._db.execute("PRAGMA wal_checkpoint(RESTART)")
            self._log_bytes = 0

    def close(self) -> None:
        with contextlib.suppress(sqlite3.Error):  # optional: everything is in the log already
            self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        self._db.close()


class SqliteReadSession:
    """`ReadSession` of store/connection.py, and `change` for the tables that are derived from the queue."""

    def __init__(self, db: SqliteConnection) -> None:
        self._db = db
        self._lock = threading.Lock()

    def read(self, query: Callable[[Connection], T]) -> T:
        with self._lock:
            try:
                return query(self._db)
            except sqlite3.Error as error:
                log.error("read_failed", exc_info=True)
                raise ReadFailed("the queue cannot be read") from error

    def change(self, job: Callable[[Connection], T]) -> T:
        return self.read(lambda db: transact(db, job, "BEGIN IMMEDIATE"))

    def close(self) -> None:
        with self._lock:
            self._db.close()
