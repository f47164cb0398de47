"""Write to the database on one thread that commits waiting jobs together (group commit).

An fsync takes milliseconds, however much is written. So the requests that arrive during one commit share the next: they
run one after the other, one commit makes all of them durable, and only then are their futures resolved. No answer is
sent for something that is not on disk.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

from treadle.errors import TreadleError
from treadle.faults import reach
from treadle.log import get_logger
from treadle.store.connection import Connection, WriteSession
from treadle.store.records import StorageFailed
from treadle.watch.waits import Waits, WaitSpec

T = TypeVar("T")
CommitWatcher = Callable[[int, float], None]  # (jobs in the commit, seconds)
MAX_JOBS_PER_COMMIT = 64
LOOK_EVERY_S = 1.0  # for trouble, while nobody writes
log = get_logger("store")


@dataclass(frozen=True, slots=True)
class _Job:
    run: Callable[[Connection], Any]
    future: Future[Any]
    num_bytes: int  # roughly what it writes
    submitted_s: float = field(default_factory=time.monotonic)


class CommitThread:
    """`writer.submit(lambda db: ...)` -> a future that resolves after the commit.

    A job may run twice: when the commit that it shared fails, it is tried again alone. So it must change
    nothing but the database.
    """

    def __init__(self, session: WriteSession, waits: Waits, wait: WaitSpec, on_failure: Callable[[], None]) -> None:
        """The session is asked for trouble after every commit, before anybody hears of it. `wait` describes a commit
        that takes long. `on_failure` is called once, from any thread, when nothing may be written any more."""
        self._session = session
        self._on_failure = on_failure
        self._waits = waits
        self._wait = wait
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._closed = False
        self._lock = threading.Lock()
        self.watchers: list[CommitWatcher] = []
        self._failure = ""
        self._given_up = (0.0, Exception())  # when the last commit began that lost the database, and its error
        self._thread = threading.Thread(target=self._work, name="store-writer", daemon=True)
        self._thread.start()

    def submit(self, run: Callable[[Connection], T], *, num_bytes: int = 0) -> Future[T]:
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
        trouble = "" if self._failure else self._session.find_trouble()
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
        began_s, (given_up_s, given_up) = time.monotonic(), self._given_up
        for job in jobs:
            if job.submitted_s < given_up_s:  # it has waited for the database as long as those before it
                job.future.set_exception(given_up)
        jobs = [job for job in jobs if job.submitted_s >= given_up_s]
        if not jobs:
            return
        try:
            with self._waits.waiting(self._wait):
                outcomes = self._commit_again_if_possible(jobs)
        except Exception as error:  # the boundary of the thread: whatever it is, the callers must hear of it
            if self._session.makes_unsafe(error):
                self._fail("the disk failed, and the queue can no longer be trusted with data: restart the hub")
            is_lost = self._session.has_lost(error)
            if len(jobs) == 1 or self._failure or is_lost:
                described = self._session.in_words(error)
                if is_lost:
                    self._given_up = (began_s, described)
                for job in jobs:
                    job.future.set_exception(described)
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
        self._session.after_commit(len(jobs), sum(job.num_bytes for job in jobs))

    def _commit_again_if_possible(self, jobs: Sequence[_Job]) -> list[tuple[Any, Exception | None]]:
        while True:
            if self._failure:  # these were queued before it failed
                raise StorageFailed(self._failure)
            try:
                return self._commit(jobs)
            except Exception as error:
                if not self._session.recovers_from(error):
                    raise

    def _commit(self, jobs: Sequence[_Job]) -> list[tuple[Any, Exception | None]]:
        outcomes: list[tuple[Any, Exception | None]] = []
        began = time.perf_counter()
        try:
            self._session.begin()
            for job in jobs:
                outcomes.append(self._run(job))
            reach("store:before_commit")
            self._session.commit()
        except BaseException:
            self._session.rollback()
            raise
        if self.find_failure():
            raise StorageFailed(self._failure)
        for watcher in self.watchers:
            try:
                watcher(len(jobs), time.perf_counter() - began)
            except Exception:  # what is committed must not be taken for failed: it would be done again
                log.error("watcher_failed", exc_info=True)
        return outcomes

    def _run(self, job: _Job) -> tuple[Any, Exception | None]:
        """A refusal is usually found out before anything is written. Where it is not, the whole transaction is undone
        and each job of it tried alone: cheaper than a savepoint for every job."""
        changes = self._session.num_changes
        try:
            return job.run(self._session.db), None
        except TreadleError as refusal:
            if self._session.num_changes != changes:
                raise
            return None, refusal
