"""Write on one thread, and commit the waiting jobs together (group commit).

An fsync costs milliseconds whatever it carries. So the requests that arrive while one commit is on its way
share the next: they run one after the other, then one commit makes all of them durable, and only then are
their futures resolved. An answer can never be sent for something that is not on disk.
"""

from __future__ import annotations

import contextlib
import queue
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from treadle.errors import DiskFull, TreadleError
from treadle.faults import reach
from treadle.log import get_logger
from treadle.store.records import StorageFailed
from treadle.watch.waits import Waits, WaitSpec

T = TypeVar("T")
CommitWatcher = Callable[[int, float], None]  # (jobs in the commit, seconds)
MAX_JOBS_PER_COMMIT = 64
DISK_PATIENCE_S = 20.0
FOLD_LOG_BYTES = 2 * 2**20  # a longer log is folded into the file after a commit; less at once stalls nobody for long
LOOK_EVERY_S = 1.0  # at the files, while nobody writes
BYTES_PER_COMMIT = 128 * 1024  # pages of tables and indexes that any commit writes, about
# After a failed fsync the kernel may have dropped the pages and report success the next time. Nothing that is
# written from then on can be trusted to be on disk.
NO_LONGER_DURABLE = (sqlite3.SQLITE_IOERR_FSYNC, sqlite3.SQLITE_IOERR_DIR_FSYNC)
log = get_logger("store")


@dataclass(frozen=True, slots=True)
class _Job:
    run: Callable[[sqlite3.Connection], Any]
    future: Future[Any]
    num_bytes: int  # roughly what it writes


class GroupCommitWriter:
    """`writer.submit(lambda db: ...)` -> a future that resolves after the commit.

    A job may run twice: when the commit that it shared fails, it is tried again alone. So it must change
    nothing but the database.
    """

    def __init__(
        self,
        db: sqlite3.Connection,
        waits: Waits,
        patience_s: float,
        look: Callable[[], str],
        on_failure: Callable[[], None],
    ) -> None:
        """`look` says what is wrong with the files of `db`, "" while nothing is. It is asked after every commit, before
        anybody hears of it. `on_failure` is called once, from any thread, when nothing may be written any more."""
        self._db = db
        self._look = look
        self._on_failure = on_failure
        self._waits = waits
        self._disk = WaitSpec(
            "the disk to take what was posted",
            fix="look at the disk of --database: is it full, or far away, or does another program hold the file?",
            of="hub",
            holding="the answers to all who posted, asked for a batch or acknowledged one",
            deadline_s=patience_s,
        )
        self._log_bytes = 0
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._closed = False
        self._lock = threading.Lock()
        self.num_commits = 0
        self.watchers: list[CommitWatcher] = []
        self._failure = ""
        self._thread = threading.Thread(target=self._work, name="store-writer", daemon=True)
        self._thread.start()

    def submit(self, run: Callable[[sqlite3.Connection], T], *, num_bytes: int = 0) -> Future[T]:
        future: Future[T] = Future()
        with self._lock:  # nothing may be queued behind the end marker: nobody would answer it
            if self._closed or self._failure:
                future.set_exception(StorageFailed(self._failure or "the store is closed"))
            else:
                self._jobs.put(_Job(run, future, num_bytes))
        return future

    def close(self) -> None:
        """Finish what was submitted, then stop."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._jobs.put(None)
        self._thread.join()

    def find_failure(self) -> str:
        """Why nothing may be written any more, as of now; "" while all is well. Once it has failed, it stays so."""
        trouble = "" if self._failure else self._look()
        if trouble:
            self._fail(trouble)
        return self._failure

    def _fail(self, why: str) -> None:
        with self._lock:
            if self._failure:
                return
            self._failure = why
        log.error("store_failed", why=why)
        self._on_failure()

    def _work(self) -> None:
        last = False
        while not last:
            try:
                drained = [self._jobs.get(timeout=LOOK_EVERY_S)]
            except queue.Empty:
                self.find_failure()
                continue
            while len(drained) < MAX_JOBS_PER_COMMIT:
                try:
                    drained.append(self._jobs.get_nowait())
                except queue.Empty:
                    break
            last = None in drained
            jobs = [job for job in drained if job is not None and job.future.set_running_or_notify_cancel()]
            if jobs:
                self._commit_or_split(jobs)

    def _commit_or_split(self, jobs: Sequence[_Job]) -> None:
        try:
            if self._failure:  # these were queued before it failed
                raise StorageFailed(self._failure)
            with self._waits.waiting(self._disk):
                outcomes = self._commit(jobs)
        except Exception as error:  # the boundary of the thread: whatever it is, the callers must hear of it
            if getattr(error, "sqlite_errorcode", None) in NO_LONGER_DURABLE:
                self._fail("the disk failed, and the queue can no longer be trusted with data: restart the hub")
            if len(jobs) == 1 or self._failure:
                for job in jobs:
                    job.future.set_exception(_in_our_words(error))
                return
            for job in jobs:  # one request that does not fit on the disk must not fail its neighbours
                self._commit_or_split([job])
            return
        reach("store:after_commit")
        for job, (result, refusal) in zip(jobs, outcomes, strict=True):
            if refusal is not None:
                job.future.set_exception(refusal)
            else:
                job.future.set_result(result)
        self._log_bytes += BYTES_PER_COMMIT + sum(job.num_bytes for job in jobs)
        if self._log_bytes > FOLD_LOG_BYTES:
            reach("store:checkpoint")
            with contextlib.suppress(sqlite3.Error):  # all callers have their answer; it is tried again later
                self._db.execute("PRAGMA wal_checkpoint(RESTART)")
            self._log_bytes = 0

    def _commit(self, jobs: Sequence[_Job]) -> list[tuple[Any, Exception | None]]:
        outcomes: list[tuple[Any, Exception | None]] = []
        began = time.perf_counter()
        self._db.execute("BEGIN IMMEDIATE")
        try:
            for job in jobs:
                outcomes.append(self._run(job))
            reach("store:before_commit")
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:  # SQLite itself rolls back on some errors, a full disk among them
                self._db.execute("ROLLBACK")
            raise
        if self.find_failure():
            raise StorageFailed(self._failure)
        self.num_commits += 1
        for watcher in self.watchers:
            try:
                watcher(len(jobs), time.perf_counter() - began)
            except Exception:  # what is committed must not be taken for failed: it would be done again
                log.error("watcher_failed", exc_info=True)
        return outcomes

    def _run(self, job: _Job) -> tuple[Any, Exception | None]:
        """A refusal is usually found out before anything is written. Where it is not, the whole transaction is undone
        and each job of it tried alone: cheaper than a savepoint for every job."""
        changes = self._db.total_changes
        try:
            return job.run(self._db), None
        except sqlite3.Error:
            raise
        except Exception as refusal:
            if not isinstance(refusal, TreadleError):
                log.error("job_failed", exc_info=True)
            if self._db.total_changes != changes:
                raise
            return None, refusal


def _in_our_words(error: Exception) -> TreadleError:
    if isinstance(error, TreadleError):
        return error
    if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL:
        log.error("disk_full")
        return DiskFull("the disk of the queue is full", fix="free some space; nothing that was accepted is lost")
    log.error("write_failed", kind=getattr(error, "sqlite_errorname", type(error).__name__))
    return StorageFailed("the queue could not be written")
