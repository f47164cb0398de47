"""The store on one SQLite file. Writes go through the group-commit thread; reads bypass it."""

from __future__ import annotations

import contextlib
import secrets
import sqlite3
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Concatenate, ParamSpec, Self, TypeVar

from treadle.errors import ConfigError, DiskFull, UserError
from treadle.log import get_logger
from treadle.store import batches, database, groups, runs
from treadle.store.database import CommitThread
from treadle.store.file import QueueFile, QueueProgress, noted_progress, refuse_lost
from treadle.store.records import (
    Appended,
    Batch,
    DamagedGroups,
    Figures,
    Lease,
    LeaseTerms,
    Limits,
    Post,
)
from treadle.watch.waits import Waits
from treadle.wire.hub import RegisterTrainer

T = TypeVar("T")
P = ParamSpec("P")
Clock = Callable[[], float]
log = get_logger("store")


class Store:
    """The durable queue.

    A method that changes something returns a future; when it has resolved, the change is on disk. Reads return what
    was last committed. The functions of runs, groups and batches are called through `read` and `write`:

        with Store.open(Path("hub.sqlite")) as store:
            store.register_trainer(registration).result()
            store.append(Post([group]), Limits(groups=1000)).result()
            lease = store.lease(step=1, holder="trainer", terms=terms).result()
            batch = store.batch_of(lease)
            store.ack(step=1, token=lease.token).result()
            store.read(groups.counts).trained.groups
            store.write(runs.reset).result()
    """

    def __init__(
        self,
        file: QueueFile,
        writing: sqlite3.Connection,
        clock: Clock,
        waits: Waits,
        on_failure: Callable[[], None],
    ) -> None:
        self.path = file.path
        self.waits = waits
        self._clock = clock
        self._process = secrets.token_hex(8)
        self._file = file
        self._writing = writing
        self._reading = database.connect(self.path)
        self._reading_lock = threading.Lock()
        self._fetching = database.connect(self.path)
        self._fetching_lock = threading.Lock()
        self._writer = CommitThread(writing, waits, file.trouble, on_failure)
        # Called after each commit, on the writer's thread: (number of changes in it, seconds). Must not raise.
        self.commit_watchers = self._writer.watchers
        self.commit_watchers.append(lambda *_: file.note(_progress(writing)))

    @classmethod
    def open(
        cls,
        path: Path,
        *,
        clock: Clock = time.monotonic,
        max_bytes: int | None = None,
        waits: Waits | None = None,
        on_failure: Callable[[], None] = lambda: None,
    ) -> Self:
        """Open or create the file. `max_bytes` bounds the database; beyond it appends end in DiskFull.

        `on_failure` is called once, from any thread, when nothing can be stored any more: see `failure`.
        """
        refuse_lost(path)
        file = QueueFile.open(path)
        with contextlib.ExitStack() as opened:
            opened.callback(file.close)
            file.refuse_other_names()
            try:
                writing = database.connect(file.path)
                opened.callback(writing.close)
                opened.callback(file.keep_log)  # what is refused is left as it is
                database.prepare(writing, file.path)
                _refuse_damaged(file.path, writing)
                runs.set_started(writing, False)
                writing.execute("PRAGMA wal_checkpoint(TRUNCATE)")  # log of a hub that was killed repeatedly
            except sqlite3.DatabaseError as error:
                raise _unreadable(file.path, error) from error
            file.begin()
            opened.pop_all()
        if max_bytes is not None:
            (page_bytes,) = writing.execute("PRAGMA page_size").fetchone()
            writing.execute(f"PRAGMA max_page_count = {max(1, max_bytes // page_bytes)}")
        return cls(file, writing, clock, waits or Waits(), on_failure)

    def close(self) -> None:
        """Finish the writes under way and fold the log into the file."""
        self._writer.close()
        with self._reading_lock, self._fetching_lock:
            self._reading.close()
            self._fetching.close()
        with contextlib.suppress(sqlite3.Error):  # optional: everything is in the log already
            self._writing.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        self._writing.close()
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def failure(self) -> str:
        """Why nothing is stored any more, as a sentence; "" while all is well. Only a restart helps."""
        return self._writer.find_failure()

    # ---- changes

    def write(
        self, change: Callable[Concatenate[sqlite3.Connection, P], T], *args: P.args, **options: P.kwargs
    ) -> Future[T]:
        """`write(runs.disconnect_env, 3)`. The change may run twice, so it must change nothing but the database."""
        return self._writer.submit(lambda db: change(db, *args, **options))

    def append(self, post: Post, limits: Limits) -> Future[Appended]:
        num_bytes = sum(len(group.payload) for group in post.groups)
        return self._writer.submit(lambda db: groups.append(db, post, limits), num_bytes=num_bytes)

    def lease(self, step: int, holder: str, terms: LeaseTerms) -> Future[Lease | None]:
        """`batch_of` reads what was leased."""
        return self._writer.submit(lambda db: batches.lease(db, step, holder, terms, self._moment()))

    def take(self, terms: LeaseTerms) -> Future[Lease | None]:
        """The next batch in line; to be acknowledged or given back like any other."""
        return self._writer.submit(lambda db: batches.take(db, terms, self._moment()))

    def renew(self, step: int, token: str, lease_s: float) -> Future[None]:
        return self._writer.submit(lambda db: batches.renew(db, step, token, lease_s, self._moment()))

    def ack(self, step: int, token: str, *, keep_trained_bytes: int = 2**62) -> Future[None]:
        return self._writer.submit(lambda db: batches.ack(db, step, token, keep_trained_bytes))

    def nack(self, step: int, token: str, *, reason: str, max_deliveries: int, counts: bool = True) -> Future[bool]:
        """True when the batch was dead-lettered."""
        return self._writer.submit(lambda db: batches.nack(db, step, token, reason, max_deliveries, counts))

    def register_trainer(self, trainer: RegisterTrainer, holder: str | None = None) -> Future[None]:
        return self._writer.submit(lambda db: batches.register_trainer(db, trainer, holder, self._moment()))

    # ---- reads

    def read(self, query: Callable[Concatenate[sqlite3.Connection, P], T], *args: P.args, **options: P.kwargs) -> T:
        """`read(runs.read_env, 3)`"""
        with self._reading_lock:
            return query(self._reading, *args, **options)

    def batch_of(self, lease: Lease) -> Batch:
        """The groups of a lease. Reads megabytes: on a connection of its own, beside everything else.

        Groups that are not as they were written are set aside, and the others wait for another batch.
        """
        with self._fetching_lock:
            stored, damaged = groups.fetch(self._fetching, lease.group_ids)
        if damaged:
            log.error("groups_damaged", step=lease.step, groups=damaged)
            self._writer.submit(lambda db: batches.set_damaged_aside(db, lease, damaged)).result()
            raise DamagedGroups(f"groups {damaged} are not as they were written and were set aside: ask again")
        return Batch(lease.step, lease.token, lease.deliveries, stored)

    def figures(self, after_event: int) -> Figures:
        """The figures of the metrics page. May take milliseconds, so on the connection that batches are read on."""
        with self._fetching_lock:
            return groups.read_figures(self._fetching, after_event)

    def _moment(self) -> batches.ProcessTime:
        return batches.ProcessTime(self._process, self._clock())


def _progress(db: sqlite3.Connection) -> QueueProgress:
    newest = db.execute("SELECT id, at FROM events ORDER BY id DESC LIMIT 1").fetchone()
    return QueueProgress(*newest) if newest else QueueProgress()


def _refuse_damaged(path: Path, db: sqlite3.Connection) -> None:
    damage = database.find_damage(db)
    if damage is not None:
        fix = "restore it, or choose another file with --database"
        raise ConfigError(f"the queue {path} is damaged: {damage}", fix=fix)
    newest, noted = _progress(db), noted_progress(path)
    fix = f"restore it and its log, or delete {path}.progress to go on with what is there"
    if newest.event < noted.event:
        lost = f"has lost its last {noted.event - newest.event} changes: the file or its log {path}-wal is damaged"
        raise ConfigError(f"the queue {path} {lost}", fix=fix)
    same_id = db.execute("SELECT at FROM events WHERE id = ?", (noted.event,)).fetchone()  # None: no longer kept
    if noted.event and same_id not in (None, (noted.at,)):
        raise ConfigError(f"{path} is another queue than the one that was used here last", fix=fix)


def _unreadable(path: Path, error: sqlite3.DatabaseError) -> UserError:
    if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL:
        return DiskFull(f"the disk of {path} is full", fix="free some space, or choose another --database")
    return ConfigError(
        f"{path} cannot be read as a queue: SQLite says '{error}'",
        fix="restore it, or choose another file with --database",
    )
