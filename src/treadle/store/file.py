"""Open, lock and watch the database file of a queue, and set it aside.

hub.sqlite           the queue; while a hub uses it, `hub.sqlite-wal` and `hub.sqlite-shm` beside it belong to it
hub.sqlite.progress  the newest event that was on disk: SQLite drops a damaged or missing end of its log silently
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import sqlite3
import stat
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from treadle.errors import ConfigError
from treadle.store import database

_MAGIC = b"SQLite format 3\0"
_HEADER = struct.Struct(">68xI")  # application_id in the header of a SQLite file
_FLOCK = struct.Struct("hhqqi")  # struct flock: type, whence, start, length, pid
_HUB_LOCK_AT = 2**62  # far from SQLite's own locks, which are at 2**30
_SHARED_LOCK_AT, _SHARED_LOCK_BYTES = 2**30 + 2, 510  # SQLite: whoever has the file open read-locks these bytes
_PARTS = ("-wal", "-shm", "", ".progress")
_ANOTHER = "choose another file with --database"
_open_here: set[tuple[int, int]] = set()  # (device, inode) of the files that this process has open


@dataclass(frozen=True, slots=True)
class QueueProgress:
    """The newest event of a queue. Its time tells it from the event of the same id in another queue."""

    event: int = 0
    at: float = 0.0


class QueueFile:
    """A database file, open and locked for one hub.

    The lock is an open file description lock on the file itself: a symlink or a hard link leads to the same lock, no
    lock file can be deleted, and the kernel drops it when the process ends, also after kill -9.
    """

    def __init__(self, path: Path, fd: int) -> None:
        self.path = path
        self._fd = fd
        self._note_fd = -1
        self._id = _id_of(os.fstat(fd))
        self._places = {path: self._id}
        _open_here.add(self._id)

    @classmethod
    def open(cls, path: Path) -> Self:
        """Create the file where there is none. A file of another program is refused and left as it is."""
        path = real_path(path)
        with _errors_in_words(path), contextlib.ExitStack() as opened:
            _refuse_irregular(path)
            path.parent.mkdir(parents=True, exist_ok=True)
            # This descriptor stays open for as long as SQLite has the file open: POSIX locks belong to the process, so
            # closing any descriptor of the file drops SQLite's locks.
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK, 0o600)
            opened.callback(os.close, fd)
            _lock(path, fd)
            if not os.path.samestat(os.stat(path), os.fstat(fd)):
                raise ConfigError(f"the queue {path} was moved while it was opened", fix="start the hub again")
            _refuse_foreign(path, fd)
            os.fchmod(fd, 0o600)
            opened.pop_all()
        return cls(path, fd)

    def refuse_other_names(self) -> None:
        links = os.fstat(self._fd).st_nlink
        if links > 1:  # SQLite finds the log by the name: under another one, the newest changes would be missing
            raise ConfigError(
                f"the queue {self.path} has {links} names (hard links), and its log belongs to only one of them",
                fix="delete the other names, or make a copy and choose that with --database",
            )

    def begin(self) -> None:
        """SQLite has opened the file and its log: from now on both are watched, and the progress is noted."""
        with _errors_in_words(self.path):
            self._note_fd = os.open(_note_path(self.path), os.O_RDWR | os.O_CREAT, 0o600)
            log = Path(f"{self.path}-wal")
            self._places[log] = _id_of(os.stat(log))

    def trouble(self) -> str:
        """What happened to the files on disk since they were opened; "" while they are in their places.

        SQLite goes on with a file that was deleted or replaced, and whatever it accepts is lost with the process.
        """
        for path, opened in self._places.items():
            try:
                found = _id_of(os.stat(path))
            except FileNotFoundError:
                return f"{path} was deleted or moved while the hub used it: nothing more is stored, and the hub ends"
            except OSError as error:
                return f"{path} cannot be found any more ({error.strerror}): nothing more is stored, and the hub ends"
            if found != opened:
                return f"{path} was replaced while the hub used it: nothing more is stored, and the hub ends"
        return ""

    def note(self, progress: QueueProgress) -> None:
        """To be called once the event is on disk: the note is never ahead of a sound queue.

        It is not synced: a power cut may leave it behind, which says nothing against the queue.
        """
        with contextlib.suppress(OSError):
            os.pwrite(self._note_fd, f"{progress.event:020d} {progress.at!r:<24}\n".encode(), 0)

    def keep_log(self) -> None:
        """Let the last connection leave the log as it is, even a damaged one.

        SQLite folds the log into the file and deletes it unless another process has the file open. The read lock makes
        it believe that.
        """
        with contextlib.suppress(OSError):
            _set_lock(self._fd, fcntl.F_RDLCK, _SHARED_LOCK_AT, _SHARED_LOCK_BYTES)

    def close(self) -> None:
        """To be called when all connections are closed."""
        self._places.clear()  # SQLite has deleted the log by now
        _open_here.discard(self._id)
        os.close(self._fd)
        if self._note_fd >= 0:
            os.close(self._note_fd)


def real_path(path: Path) -> Path:
    """The absolute path without symlinks. Names that SQLite does not take for files are refused."""
    name = str(path)
    if name == ":memory:" or name.startswith("file:") or "\0" in name:
        raise ConfigError(
            f"--database {name!r} is not the path of a file: the queue must outlive its process",
            fix="name a file, such as --database hub.sqlite",
        )
    return Path(os.path.realpath(path))


def noted_progress(path: Path) -> QueueProgress:
    """How far the queue at `path` had come; the zero progress where nothing is noted."""
    try:
        event, at = _note_path(path).read_bytes().split()
        return QueueProgress(int(event), float(at))
    except (OSError, ValueError):
        return QueueProgress()


def refuse_lost(path: Path) -> None:
    """A file that is gone or empty is no new queue when the note beside it says that there was one."""
    path = real_path(path)
    noted = noted_progress(path)
    with _errors_in_words(path):
        if noted.event and not (path.exists() and path.stat().st_size):
            raise ConfigError(
                f"the queue {path} is gone: {_note_path(path)} says that it had {noted.event} changes",
                fix="restore it, or begin with an empty queue: --fresh true",
            )


def set_aside(path: Path) -> None:
    """Rename the files of an earlier queue, if there is one: `hub.sqlite` becomes `hub.sqlite.20260102-030405`.

    No file is overwritten, and a file of another program is refused.
    """
    path = real_path(path)
    with _errors_in_words(path):
        try:
            os.lstat(path)
        except FileNotFoundError:
            _rename(path, time.time())  # what a deleted queue left
            return
        file = QueueFile.open(path)
        try:
            # A damaged one is renamed as it is; else the one file is the whole queue.
            with contextlib.suppress(sqlite3.Error), contextlib.closing(database.connect(path)) as db:
                db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            _rename(path, path.stat().st_mtime)
        finally:
            file.close()


def _rename(path: Path, written_at: float) -> None:
    there = [part for part in _PARTS if os.path.lexists(f"{path}{part}")]
    if not there:
        return
    stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(written_at))
    for number in itertools.count(1):
        aside = f"{path}.{stamp}" + (f"-{number}" if number > 1 else "")
        if any(os.path.lexists(f"{aside}{part}") for part in _PARTS):
            continue
        try:  # a rename replaces what has the name: so take the name first
            os.close(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        except FileExistsError:
            continue
        break
    for part in there:
        os.rename(f"{path}{part}", f"{aside}{part}")
    if "" not in there:
        os.unlink(aside)


def _refuse_irregular(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        found = os.stat(path)
        if not stat.S_ISREG(found.st_mode):
            kind = "a directory" if stat.S_ISDIR(found.st_mode) else "not a regular file"
            raise ConfigError(f"the queue {path} cannot be opened: it is {kind}", fix=_ANOTHER)
        if _id_of(found) in _open_here:
            raise _in_use(path, os.getpid())


def _refuse_foreign(path: Path, fd: int) -> None:
    """Check the header, which a hub writes before it turns the log on: SQLite never opens a foreign file."""
    header = os.pread(fd, _HEADER.size, 0)
    if header and (len(header) < _HEADER.size or not header.startswith(_MAGIC)):
        fix = f"restore it, or {_ANOTHER}"
        raise ConfigError(f"{path} cannot be read as a queue: it is damaged, or no SQLite file", fix=fix)
    if header and _HEADER.unpack(header)[0] != database.APPLICATION_ID:
        raise ConfigError(f"{path} is a database of another program", fix=_ANOTHER)


def _lock(path: Path, fd: int) -> None:
    """The kernel names no owner of such a lock, so the number of locked bytes is the owner's pid."""
    while True:
        try:
            _set_lock(fd, fcntl.F_WRLCK, _HUB_LOCK_AT, os.getpid())
            return
        except BlockingIOError:
            if pid := _holder(fd):  # else it was released meanwhile
                raise _in_use(path, pid) from None


def refuse_locked(path: Path) -> None:
    """Raise ConfigError when another process has the queue open; nothing where there is no queue."""
    try:
        fd = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return
    try:
        if pid := _holder(fd):
            raise ConfigError(
                f"the queue {path} is open in process {pid}: a hub, or the page of this run (treadle dash)",
                fix=f"end that process (kill {pid}), then try again",
            )
    finally:
        os.close(fd)


def _holder(fd: int) -> int:
    """The process that has the lock, 0: none."""
    asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, _HUB_LOCK_AT, 1, 0)
    kind, _, _, pid, _ = _FLOCK.unpack(fcntl.fcntl(fd, fcntl.F_OFD_GETLK, asked))
    return 0 if kind == fcntl.F_UNLCK else pid


def _set_lock(fd: int, kind: int, start: int, num_bytes: int) -> None:
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, start, num_bytes, 0))


def _in_use(path: Path, pid: int) -> ConfigError:
    fix = f"stop it, or {_ANOTHER}"
    return ConfigError(f"the queue {path} is in use by another hub, process {pid}", fix=fix)


@contextlib.contextmanager
def _errors_in_words(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise ConfigError(f"the queue {path} cannot be opened: {error.strerror}", fix=_ANOTHER) from error


def _note_path(path: Path) -> Path:
    return Path(f"{path}.progress")


def _id_of(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino
