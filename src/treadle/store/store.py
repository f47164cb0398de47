"""The durable queue, whichever database holds it. Writes go through the group-commit thread; reads bypass it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Concatenate, ParamSpec, Self, TypeVar

from treadle.log import get_logger
from treadle.store import batches, groups
from treadle.store.browse import Browser
from treadle.store.commit_thread import CommitThread
from treadle.store.connection import Connection, ReadSession, WriteSession
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
from treadle.watch.waits import Waits, WaitSpec
from treadle.wire.hub import RegisterTrainer

T = TypeVar("T")
P = ParamSpec("P")
ReadMoment = Callable[[Connection], batches.ProcessTime]
log = get_logger("store")


@dataclass(frozen=True, slots=True)
class Sessions:
    """The connections of a store: one for changes, one for short reads, one for the contents of groups."""

    writing: WriteSession
    reading: ReadSession
    fetching: ReadSession


class Store:
    """The durable queue.

    A method that changes something returns a future; when it has resolved, the change is on disk. Reads return what
    was last committed. The functions of runs, groups and batches are called through `read` and `write`:

        with SqliteStore.open(Path("hub.sqlite")) as store:
            store.register_trainer(registration).result()
            store.append(Post([group]), Limits(groups=1000)).result()
            lease = store.lease(step=1, holder="trainer", terms=terms).result()
            batch = store.batch_of(lease)
            store.ack(step=1, token=lease.token).result()
            store.read(groups.counts).trained.groups
            store.write(runs.reset).result()
    """

    is_shared = False  # whether several hubs may serve the queue at once

    def __init__(
        self,
        sessions: Sessions,
        moment: ReadMoment,
        waits: Waits,
        slow_commit: WaitSpec,
        on_failure: Callable[[], None],
    ) -> None:
        self.waits = waits
        self._sessions = sessions
        self._moment = moment
        self._writer = CommitThread(sessions.writing, waits, slow_commit, on_failure)
        # Called after each commit, on the writer's thread: (number of changes in it, seconds). Must not raise.
        self.commit_watchers = self._writer.watchers
        # Called after another hub on the same database has committed, on any thread. Must not raise.
        self.change_watchers: list[Callable[[], None]] = []

    def close(self) -> None:
        """Finish the writes under way."""
        self._writer.close()
        self._sessions.reading.close()
        self._sessions.fetching.close()
        self._sessions.writing.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def failure(self) -> str:
        """Why nothing is stored any more, as a sentence; "" while all is well. Only a restart helps."""
        return self._writer.find_failure()

    def exchange(self, facts: bytes, max_age_s: float) -> list[bytes]:
        """Send `facts` to the other hubs on the same database; returns what each sent last, at most `max_age_s` ago."""
        return []

    def open_browser(self) -> Browser:
        """Search and read its groups, on a connection of its own."""
        raise NotImplementedError

    # ---- changes

    def write(self, change: Callable[Concatenate[Connection, P], T], *args: P.args, **options: P.kwargs) -> Future[T]:
        """`write(runs.disconnect_env, 3)`. The change may run twice, so it must change nothing but the database."""
        return self._writer.submit(lambda db: change(db, *args, **options))

    def append(self, post: Post, limits: Limits) -> Future[Appended]:
        num_bytes = sum(len(group.payload) for group in post.groups)
        return self._writer.submit(lambda db: groups.append(db, post, limits), num_bytes=num_bytes)

    def lease(self, step: int, holder: str, terms: LeaseTerms) -> Future[Lease | None]:
        """`batch_of` reads what was leased."""
        return self._writer.submit(lambda db: batches.lease(db, step, holder, terms, self._moment(db)))

    def take(self, terms: LeaseTerms) -> Future[Lease | None]:
        """The next batch in line; to be acknowledged or given back like any other."""
        return self._writer.submit(lambda db: batches.take(db, terms, self._moment(db)))

    def renew(self, step: int, token: str, lease_s: float) -> Future[None]:
        return self._writer.submit(lambda db: batches.renew(db, step, token, lease_s, self._moment(db)))

    def ack(self, step: int, token: str, *, keep_trained_bytes: int = 2**62) -> Future[None]:
        return self._writer.submit(lambda db: batches.ack(db, step, token, keep_trained_bytes))

    def nack(self, step: int, token: str, *, reason: str, max_deliveries: int, counts: bool = True) -> Future[bool]:
        """True when the batch was dead-lettered."""
        return self._writer.submit(lambda db: batches.nack(db, step, token, reason, max_deliveries, counts))

    def register_trainer(self, trainer: RegisterTrainer, holder: str | None = None) -> Future[None]:
        return self._writer.submit(lambda db: batches.register_trainer(db, trainer, holder, self._moment(db)))

    # ---- reads

    def read(self, query: Callable[Concatenate[Connection, P], T], *args: P.args, **options: P.kwargs) -> T:
        """`read(runs.read_env, 3)`"""
        return self._sessions.reading.read(lambda db: query(db, *args, **options))

    def batch_of(self, lease: Lease) -> Batch:
        """The groups of a lease. Reads megabytes: on a connection of its own, beside everything else.

        Groups that are not as they were written are set aside, and the others wait for another batch.
        """
        stored, damaged = self._sessions.fetching.read(lambda db: groups.fetch(db, lease.group_ids))
        if damaged:
            self._set_damaged_aside(lease, damaged)
        return Batch(lease.step, lease.token, lease.deliveries, stored)

    def _set_damaged_aside(self, lease: Lease, damaged: Sequence[int]) -> None:
        log.error("groups_damaged", step=lease.step, groups=damaged)
        self._writer.submit(lambda db: batches.set_damaged_aside(db, lease, damaged)).result()
        raise DamagedGroups(f"groups {damaged} are not as they were written and were set aside: ask again")

    def figures(self, after_event: int) -> Figures:
        """The figures of the metrics page. May take milliseconds, so on the connection that batches are read on."""
        return self._sessions.fetching.read(lambda db: groups.read_figures(db, after_event))
