"""The store on one SQLite file: changes go through the group-commit writer, looks beside it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import sqlite3
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Self, TypeVar

from treadle.errors import ConfigError, DiskFull, UserError
from treadle.store import batches, envs, groups, runs, schema
from treadle.store.records import (
    Appended,
    Batch,
    Counts,
    DeadGroup,
    EnvLoad,
    EnvRecord,
    LeaseTerms,
    Post,
    RunState,
    Waiting,
)
from treadle.store.writer import GroupCommitWriter
from treadle.wire.hub import RegisterEnv, RegisterTrainer

T = TypeVar("T")
Clock = Callable[[], float]


class Store:
    """The durable queue.

    A verb that changes something returns a future; when it has resolved, the change is on disk. A verb that
    only looks returns at once with what was last committed.

        with Store.open(Path("hub.sqlite")) as store:
            store.register_trainer(registration).result()
            store.append(Post([group]), limit_groups=1000).result()
            batch = store.lease(step=1, holder="trainer", terms=terms).result()
            store.ack(step=1, token=batch.token).result()
    """

    def __init__(self, path: Path, writing: sqlite3.Connection, clock: Clock, lock_fd: int) -> None:
        self.path = path
        self._clock = clock
        self._process = secrets.token_hex(8)
        self._lock_fd = lock_fd
        self._writing = writing
        self._reading = schema.connect(path)
        self._reading_lock = threading.Lock()
        self._writer = GroupCommitWriter(writing)

    @classmethod
    def open(cls, path: Path, *, clock: Clock = time.monotonic, max_bytes: int | None = None) -> Self:
        """Open or create the file. `max_bytes` bounds the database; beyond it appends end in DiskFull."""
        lock_fd = _create_and_lock(path)
        try:
            writing = schema.connect(path)
            schema.prepare(writing, path)
            runs.begin_life(writing)
        except sqlite3.DatabaseError as error:
            os.close(lock_fd)
            raise _unreadable(path, error) from error
        except BaseException:
            os.close(lock_fd)
            raise
        if max_bytes is not None:
            (page_bytes,) = writing.execute("PRAGMA page_size").fetchone()
            writing.execute(f"PRAGMA max_page_count = {max(1, max_bytes // page_bytes)}")
        return cls(path, writing, clock, lock_fd)

    def close(self) -> None:
        """Finish the writes under way and fold the log into the file."""
        self._writer.close()
        with self._reading_lock:
            self._reading.close()
        with contextlib.suppress(sqlite3.Error):  # all is safe in the log already: this is a courtesy
            self._writing.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        self._writing.close()
        os.close(self._lock_fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def num_commits(self) -> int:
        return self._writer.num_commits

    @property
    def is_broken(self) -> bool:
        """The disk failed to keep a promise; only a restart, which reads what is really there, helps."""
        return self._writer.is_broken

    # ---- changes

    def append(self, post: Post, *, limit_groups: int) -> Future[Appended]:
        return self._writer.submit(lambda db: groups.append(db, post, limit_groups))

    def lease(self, step: int, holder: str, terms: LeaseTerms) -> Future[Batch | None]:
        return self._writer.submit(lambda db: batches.lease(db, step, holder, terms, self._moment()))

    def take(self, terms: LeaseTerms) -> Future[Batch | None]:
        return self._writer.submit(lambda db: batches.take(db, terms, self._moment()))

    def renew(self, step: int, token: str, lease_s: float) -> Future[None]:
        return self._writer.submit(lambda db: batches.renew(db, step, token, lease_s, self._moment()))

    def ack(self, step: int, token: str) -> Future[None]:
        return self._writer.submit(lambda db: batches.ack(db, step, token))

    def nack(self, step: int, token: str, *, reason: str, max_deliveries: int) -> Future[bool]:
        """True when the batch was dead-lettered."""
        return self._writer.submit(lambda db: batches.nack(db, step, token, reason, max_deliveries))

    def register_trainer(self, trainer: RegisterTrainer, holder: str | None = None) -> Future[None]:
        def register(db: sqlite3.Connection) -> None:
            runs.register_trainer(db, trainer)
            if holder is not None:
                batches.release_holder(db, holder)

        return self._writer.submit(register)

    def register_env(
        self, env: RegisterEnv, *, resume: bool, idle_s: Callable[[int], float], gone_after_s: float
    ) -> Future[EnvRecord]:
        return self._writer.submit(
            lambda db: envs.register(db, env, resume=resume, idle_s=idle_s, gone_after_s=gone_after_s)
        )

    def disconnect_env(self, env_id: int) -> Future[bool]:
        return self._writer.submit(lambda db: envs.disconnect(db, env_id))

    def reset(self) -> Future[None]:
        return self._writer.submit(runs.reset)

    # ---- looks

    def run_state(self) -> RunState:
        return self._look(runs.read)

    def counts(self) -> Counts:
        return self._look(groups.counts)

    def waiting_sizes(self) -> dict[int, int]:
        return self._look(groups.waiting_sizes)

    def waiting(self, batch_size: int) -> list[Waiting]:
        return self._look(lambda db: groups.waiting(db, batch_size))

    def env(self, env_id: int) -> EnvRecord | None:
        return self._look(lambda db: envs.read(db, env_id))

    def envs(self) -> list[EnvRecord]:
        return self._look(envs.read_all)

    def env_load(self, env_id: int) -> EnvLoad:
        return self._look(lambda db: groups.env_load(db, env_id))

    def latest_payload(self) -> bytes | None:
        return self._look(groups.latest_payload)

    def dead_groups(self, limit: int = 1000) -> list[DeadGroup]:
        return self._look(lambda db: groups.dead_groups(db, limit))

    def _look(self, read: Callable[[sqlite3.Connection], T]) -> T:
        with self._reading_lock:
            return read(self._reading)

    def _moment(self) -> batches.Moment:
        return batches.Moment(self._process, self._clock())


def _create_and_lock(path: Path) -> int:
    """One process a file. The kernel drops the lock with its process, also after kill -9.

    The lock is on a file beside the database: closing a second handle of the database itself would drop the
    locks that SQLite holds on it.
    """
    try:
        schema.create_file(path)
        lock_fd = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        fix = "choose another file with --database"
        raise ConfigError(f"the queue {path} cannot be opened: {error.strerror}", fix=fix) from error
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock_fd)
        fix = "stop it, or choose another file with --database"
        raise ConfigError(f"the queue {path} is in use by another hub", fix=fix) from None
    return lock_fd


def _unreadable(path: Path, error: sqlite3.DatabaseError) -> UserError:
    if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL:
        return DiskFull(f"the disk of {path} is full", fix="free some space, or choose another --database")
    return ConfigError(
        f"{path} cannot be read as a queue: it is damaged, or no SQLite file",
        fix="restore it, or choose another file with --database",
    )
