"""The SQLite file: its tables, its version, and how it is opened."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path

from treadle.errors import ConfigError

APPLICATION_ID = 0x74726564  # "tred": tells our files from other programs' SQLite files
SCHEMA_VERSION = 1
BUSY_TIMEOUT_MS = 5000

# tally is kept by triggers, inside the transaction that changes a group. Counting is then a look at a few
# rows however long the queue is, and it can never disagree with the groups themselves.
_TABLES = """
CREATE TABLE run (
    id INTEGER PRIMARY KEY CHECK (id = 1),
    trainer BLOB,                                -- JSON of the registration; NULL before it
    current_step INTEGER NOT NULL DEFAULT 0,
    started INTEGER NOT NULL DEFAULT 0
) STRICT;
INSERT INTO run (id) VALUES (1);

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

CREATE TABLE posts (
    key TEXT PRIMARY KEY,
    body_hash BLOB NOT NULL,
    num_groups INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

CREATE TABLE groups (
    id INTEGER PRIMARY KEY AUTOINCREMENT,        -- the order of arrival
    state TEXT NOT NULL DEFAULT 'queued' CHECK (state IN ('queued', 'leased', 'trained', 'dead')),
    env_id INTEGER,                              -- as posted; it need not be registered
    size INTEGER NOT NULL,
    num_tokens INTEGER NOT NULL,
    policy_version INTEGER,
    item INTEGER,
    received_at REAL NOT NULL,
    dead_step INTEGER,
    dead_reason TEXT,
    metrics BLOB,
    payload BLOB NOT NULL                        -- last, so that the small columns are read without it
) STRICT;
CREATE INDEX groups_queued ON groups (id, size) WHERE state = 'queued';
CREATE INDEX groups_queued_size ON groups (size) WHERE state = 'queued';
CREATE INDEX groups_queued_env ON groups (env_id, size) WHERE state = 'queued';
CREATE INDEX groups_dead ON groups (id) WHERE state = 'dead';

CREATE TABLE batches (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    step INTEGER NOT NULL,
    state TEXT NOT NULL DEFAULT 'open' CHECK (state IN ('open', 'trained', 'dead', 'superseded')),
    group_ids TEXT NOT NULL,                     -- JSON array, in the order of delivery
    deliveries INTEGER NOT NULL DEFAULT 0,
    token TEXT,                                  -- fencing token of the latest lease
    holder TEXT,                                 -- NULL: nobody holds it
    process TEXT,                                -- the hub process whose clock the deadline is on
    deadline_s REAL,
    formed_at REAL NOT NULL
) STRICT;
CREATE UNIQUE INDEX batches_of_step ON batches (step) WHERE state IN ('open', 'trained');
CREATE INDEX batches_held ON batches (holder) WHERE holder IS NOT NULL;

CREATE TABLE tally (
    state TEXT NOT NULL,
    env TEXT NOT NULL,                           -- the env id in digits, 'none' when there is none
    groups INTEGER NOT NULL,
    sequences INTEGER NOT NULL,
    PRIMARY KEY (state, env)
) STRICT, WITHOUT ROWID;
CREATE TRIGGER tally_insert AFTER INSERT ON groups BEGIN
    INSERT INTO tally VALUES (NEW.state, ifnull(CAST(NEW.env_id AS TEXT), 'none'), 1, NEW.size)
    ON CONFLICT DO UPDATE SET groups = groups + 1, sequences = sequences + excluded.sequences;
END;
CREATE TRIGGER tally_move AFTER UPDATE OF state ON groups BEGIN
    UPDATE tally SET groups = groups - 1, sequences = sequences - OLD.size
    WHERE state = OLD.state AND env = ifnull(CAST(OLD.env_id AS TEXT), 'none');
    INSERT INTO tally VALUES (NEW.state, ifnull(CAST(NEW.env_id AS TEXT), 'none'), 1, NEW.size)
    ON CONFLICT DO UPDATE SET groups = groups + 1, sequences = sequences + excluded.sequences;
END;
"""


def create_file(path: Path) -> None:
    """Make the file before SQLite does, so that it never exists with wider permissions than ours."""
    path.parent.mkdir(parents=True, exist_ok=True)
    os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
    path.chmod(0o600)


def connect(path: Path) -> sqlite3.Connection:
    """A connection in autocommit mode: transactions are begun by hand. A commit returns after fsync."""
    db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    db.execute(f"PRAGMA busy_timeout = {BUSY_TIMEOUT_MS}")
    db.execute("PRAGMA journal_mode = WAL")
    db.execute("PRAGMA synchronous = FULL")
    return db


def prepare(db: sqlite3.Connection, path: Path) -> None:
    """Create the tables in a new file; refuse a file that is not ours or that a newer version wrote."""
    (version,) = db.execute("PRAGMA user_version").fetchone()
    (num_tables,) = db.execute("SELECT count(*) FROM sqlite_schema").fetchone()
    if version == 0 and num_tables == 0:
        db.executescript(
            f"BEGIN IMMEDIATE; PRAGMA application_id = {APPLICATION_ID}; {_TABLES}"
            f"PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;"
        )
        return
    (application,) = db.execute("PRAGMA application_id").fetchone()
    if application != APPLICATION_ID:
        raise ConfigError(f"{path} is a database of another program", fix="choose another file with --database")
    if version > SCHEMA_VERSION:
        raise ConfigError(
            f"{path} has schema version {version}; this program knows versions up to {SCHEMA_VERSION}",
            fix="use the newer release that wrote it, or choose another file with --database",
        )
