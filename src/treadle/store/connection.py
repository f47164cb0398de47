"""What the queue's rules and the commit thread need of a database, whichever it is.

runs.py, groups.py and batches.py are the rules. Their SQL is understood by SQLite and by PostgreSQL; where the two
differ, `Connection` has a member for it. A store (sqlite.py, postgres.py) provides one WriteSession and two
ReadSessions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class Rows(Protocol):
    """The answer to a statement, as DB-API cursors give it."""

    @property
    def rowcount(self) -> int: ...

    def fetchone(self) -> Any: ...

    def fetchall(self) -> list[Any]: ...

    def __iter__(self) -> Iterator[Any]: ...


class Connection(Protocol):
    """A connection in autocommit mode. Statements use `?` for parameters."""

    # SQL: the ids in a parameter that is a JSON array of ids; to be used as `id IN {ids_in}`.
    ids_in: str
    # SQL: at the end of a SELECT, keeps other transactions from reading these rows this way until this one ends.
    for_update: str

    def execute(self, sql: str, parameters: Sequence[Any] = ..., /) -> Rows: ...

    def snapshot(self) -> AbstractContextManager[None]:
        """Reads inside are as of one moment."""
        ...

    def is_damage(self, error: Exception) -> bool:
        """Whether a read failed because stored data is damaged; other data can still be read."""
        ...


class WriteSession(Protocol):
    """The connection that the commit thread writes on. Only that thread calls it, except `find_trouble`."""

    @property
    def db(self) -> Connection: ...

    @property
    def num_changes(self) -> int:
        """How many rows were changed so far."""
        ...

    def begin(self) -> None:
        """Begin a transaction that no other writer, of this or of another hub, runs beside."""
        ...

    def commit(self) -> None:
        """When this returns, the changes are on disk. An exception: none of them is stored."""
        ...

    def rollback(self) -> None: ...

    def find_trouble(self) -> str:
        """Why nothing may be written any more, as a sentence; "" while all is well."""
        ...

    def recovers_from(self, error: Exception) -> bool:
        """Whether the session is in order again after this error, so that the jobs can be tried again as they were."""
        ...

    def has_lost(self, error: Exception) -> bool:
        """Whether the database was waited for in vain, so that it is useless to try the jobs one by one."""
        ...

    def makes_unsafe(self, error: Exception) -> bool:
        """Whether nothing written after this error can be trusted to be on disk."""
        ...

    def in_words(self, error: Exception) -> Exception:
        """The error for the caller whose change could not be written. A fault of this program stays as it is."""
        ...

    def after_commit(self, num_jobs: int, num_bytes: int) -> None:
        """All callers have their answers: time for upkeep. Must not raise."""
        ...

    def close(self) -> None: ...


class ReadSession(Protocol):
    """A connection for reads, which may be used by several threads."""

    def read(self, query: Callable[[Connection], T]) -> T:
        """Raises ReadFailed when the database cannot be read."""
        ...

    def close(self) -> None: ...


class IndexSession(ReadSession, Protocol):
    """A connection that also writes the index of group search, which is derived from the queue."""

    def change(self, job: Callable[[Connection], T]) -> T:
        """Run it in one transaction."""
        ...


def transact(db: Connection, job: Callable[[Connection], T], begin: str = "BEGIN") -> T:
    """Run a job in one transaction."""
    db.execute(begin)
    try:
        result = job(db)
        db.execute("COMMIT")
    except BaseException:
        with suppress(Exception):  # the first error counts
            db.execute("ROLLBACK")
        raise
    return result
