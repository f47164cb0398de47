"""Coordinate an engine process and a trainer process: who they are, and a gate at which the engine pauses.

`ProcessIdentity` names the owner of a shared file, `Publisher` the trainer that publishes to an engine.

`PublishGate` pauses an engine between two tokens while a trainer writes its weights, through a few bytes that both map:

    worker:   gate.wait_for_write(publish_id)                  pauses; returns when the weights are written
    trainer:  gate.wait_until_paused(publish_id); write;       gate.mark_written(publish_id)
    engine:   gate.abandon(publish_id)                         the trainer is gone: the worker stops waiting

A trainer holds a lock on the file while it publishes. The lock ends with its process, so the engine notices at once
when the trainer dies. A cell names the publish of the lock's holder: the next trainer may lock before the engine looks.

Over HTTP the engine would be paused while its busy event loops pass on four messages: tens of milliseconds, for a write
of three. Here the pause is the write and a few hundredths of a millisecond.

Each cell has one writer. Each publish has its own id, so leftovers of an earlier publish have no effect.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import mmap
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Annotated, Any

import msgspec

from treadle.background import awake_s
from treadle.errors import RequestError, SyncError
from treadle.wire.bridge import Adopt

PUBLISHER_HEADER = "Treadle-Publisher"  # sent with a trainer's requests to an engine


class ProcessIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """(pid, start time), because pids are reused."""

    pid: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
    started: int  # clock ticks since boot; 0 where this is unknown (not on Linux)

    @property
    def is_alive(self) -> bool:
        """Whether this process still runs, on this machine."""
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            pass  # it runs as another user
        return self.started == _started(self.pid)


class Publisher(msgspec.Struct, frozen=True, kw_only=True):
    """The trainer process that publishes to an engine, and the run that it trains."""

    run: str  # --save-path and host: the same after a restart of the trainer
    machine: str
    process: ProcessIdentity

    def is_same_process(self, other: Publisher) -> bool:
        return (self.machine, self.process) == (other.machine, other.process)

    @property
    def may_be_gone(self) -> bool:
        """False only for a live process on this machine."""
        return self.machine != _machine() or not self.process.is_alive

    def as_header(self) -> str:
        return json.dumps(msgspec.to_builtins(self))  # JSON escapes non-ASCII characters of a path


def this_process() -> ProcessIdentity:
    return ProcessIdentity(pid=os.getpid(), started=_started(os.getpid()))


def this_publisher(save_path: Path) -> Publisher:
    run = f"{save_path.resolve()} on {socket.gethostname()}".encode(errors="replace").decode()
    return Publisher(run=run, machine=_machine(), process=this_process())


def _machine() -> str:
    """Equal for processes that share PIDs: the same boot and PID namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # not on Linux
        return socket.gethostname()


def _started(pid: int) -> int:
    """Start time in clock ticks; 0 for a process that has ended, even if it was not reaped yet."""
    try:
        line = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    fields = line.rpartition(")")[2].split()  # the command name in brackets may contain anything
    return 0 if fields[0] in ("Z", "X") else int(fields[19])


POLL_S = 0.00005
_CHECK_TRAINER_S = 0.5
_LOCK_WAIT_S = 0.2  # an engine that checks for a trainer holds the lock for a moment
_PAUSED, _WRITTEN, _ABANDONED, _ALLOWED, _PUBLISHING = range(5)  # the cells
_NUM_BYTES = 8 * 5


class PublishGate:
    """`create` replaces the file: processes that mapped an earlier one keep that."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._file = path.open("r+b")
            self._probe = path.open("rb")  # a second handle, because locks belong to handles
            self._memory = mmap.mmap(self._file.fileno(), _NUM_BYTES)
        except (OSError, ValueError) as error:
            raise SyncError(
                f"cannot map the engine's gate {path}: {error}",
                fix="start the engine again; it and the trainer must be on one machine, and the same user's",
            ) from None
        self._cells = memoryview(self._memory).cast("q")

    @staticmethod
    def create(path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.ftruncate(handle, _NUM_BYTES)
        finally:
            os.close(handle)

    def wait_for_write(self, publish_id: int, *, until_allowed: bool = False) -> float:
        """Pause until the trainer has written, and return the seconds; SyncError if the publish was abandoned.
        `until_allowed`: wait for `allow_resume` too."""
        started = time.monotonic()
        self._cells[_PAUSED] = publish_id
        while self._cells[_WRITTEN] != publish_id or (until_allowed and self._cells[_ALLOWED] != publish_id):
            if self._cells[_ABANDONED] == publish_id:
                raise SyncError(
                    "the trainer did not finish writing the weights",
                    fix="let a trainer publish again (treadle run --resume), or POST /bridge/restart",
                )
            time.sleep(POLL_S)
        return time.monotonic() - started

    def wait_until_paused(self, publish_id: int, *, is_over: Callable[[], bool]) -> bool:
        """Whether the engine paused; False if `is_over` before that."""
        while self._cells[_PAUSED] != publish_id:
            if is_over():
                return self._cells[_PAUSED] == publish_id
            time.sleep(POLL_S)
        return True

    @property
    def inode(self) -> int:
        """Of the mapped file; the path may point to a newer one by now."""
        return os.fstat(self._file.fileno()).st_ino

    @contextmanager
    def publishing(self, publish_id: int) -> Iterator[None]:
        """Hold the lock for this publish; one trainer at a time."""
        deadline = time.monotonic() + _LOCK_WAIT_S
        while not _try_lock(self._file, fcntl.LOCK_EX):
            if time.monotonic() > deadline:
                raise SyncError(
                    f"another trainer publishes to this engine now (it has locked {self._path})",
                    fix="let one trainer publish to one engine",
                )
            time.sleep(POLL_S)
        self._cells[_PUBLISHING] = publish_id
        try:
            yield
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    def is_publishing(self, publish_id: int) -> bool:
        """Whether the trainer of this publish lives and has not ended it. Another one may hold the lock by now."""
        if not _try_lock(self._probe, fcntl.LOCK_SH):
            return self._cells[_PUBLISHING] == publish_id
        fcntl.flock(self._probe, fcntl.LOCK_UN)
        return False

    def mark_written(self, publish_id: int) -> None:
        self._cells[_WRITTEN] = publish_id

    def allow_resume(self, publish_id: int) -> None:
        self._cells[_ALLOWED] = publish_id

    def was_written(self, publish_id: int) -> bool:
        return self._cells[_WRITTEN] == publish_id

    def abandon(self, publish_id: int) -> None:
        self._cells[_ABANDONED] = publish_id


def _try_lock(file: IO[bytes], kind: int) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def check_publish_order(order: Adopt, served: int, gate: PublishGate) -> None:
    """Refuse a trainer that expects another version or other memory, and a request without a trainer."""
    if order.after_version not in (None, served):
        what = f"it serves version {served}, where {order.after_version} was published last"
    elif order.gate != gate.inode:
        what = "its weights lie elsewhere than where they were attached"
    elif not gate.is_publishing(order.number):
        raise RequestError("no trainer is at the gate", fix="lock it first (sync/gate.py); trainers do")
    else:
        return
    raise RequestError(
        f"{what}: it was restarted, or another trainer publishes to it",
        fix="end the other trainer, restart the engine, then treadle run --resume",
    )


async def wait_for_trainer(pausing: asyncio.Future[Any], gate: PublishGate, publish_id: int, timeout_s: float) -> bool:
    """Wait for `pausing`, a worker in `wait_for_write`. False: the trainer ended before it had written, or the timeout
    passed."""
    deadline = awake_s() + timeout_s
    while not (await asyncio.wait({pausing}, timeout=_CHECK_TRAINER_S))[0]:
        is_gone = not gate.is_publishing(publish_id) and not gate.was_written(
            publish_id
        )  # in this order: it writes, then unlocks
        if is_gone or awake_s() > deadline:
            return False
    return True


def gate_beside(weights_file: Path) -> Path:
    return weights_file.with_name(weights_file.name + ".gate")
