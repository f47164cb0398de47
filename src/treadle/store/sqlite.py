"""The queue in one SQLite file."""

from __future__ import annotations

import contextlib
import secrets
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

from treadle.errors import ConfigError, DiskFull, UserError
from treadle.store import database, runs
from treadle.store.batches import ProcessTime
from treadle.store.browse import Browser
from treadle.store.database import SqliteConnection, SqliteReadSession, SqliteWriteSession
from treadle.store.file import QueueFile, QueueProgress, noted_progress, refuse_lost
from treadle.store.store import Sessions, Store
from treadle.watch.waits import Waits

Clock = Callable[[], float]


class SqliteStore(Store):
    """`with SqliteStore.open(Path("hub.sqlite")) as store: ...`; one process at a time can open a file."""

    def __init__(
        self,
        file: QueueFile,
        writing: SqliteConnection,
        clock: Clock,
        waits: Waits,
        on_failure: Callable[[], None],
    ) -> None:
        process = secrets.token_hex(8)
        sessions = Sessions(
            writing=SqliteWriteSession(writing, file.trouble),
            reading=SqliteReadSession(database.connect(file.path)),
            fetching=SqliteReadSession(database.connect(file.path)),
        )
        super().__init__(sessions, lambda _: ProcessTime(process, clock()), waits, database.DISK_WAIT, on_failure)
        self.path = file.path
        self._file = file
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
        super().close()
        self._file.close()

    def open_browser(self) -> Browser:
        return Browser.open(self.path)


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
