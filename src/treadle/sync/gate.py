"""Where an engine stands still between two tokens while a trainer writes its weights: a few bytes that both map.

    worker:   gate.stand_still(number)                 "nobody reads the weights now", until they are written
    trainer:  gate.wait_until_still(number); write;    gate.go_on(number)
    engine:   gate.give_up(number)                     the trainer does not come back: the worker need not wait

A trainer keeps the file locked while it publishes. A lock goes with its process, however that ends, so an engine sees
at once that nobody will finish.

Asked by HTTP, an engine would stand still for as long as its busy event loops take to pass on four messages: tens of
milliseconds, for a write of three. Here it is the write and a few hundredths of a millisecond.

Each cell has one writer. A publish has a number of its own, so that nothing which is left of an earlier one counts.
"""

from __future__ import annotations

import asyncio
import fcntl
import mmap
import os
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from treadle.clock import awake_s
from treadle.errors import RequestError, SyncError
from treadle.wire.bridge import Adopt

LOOK_S = 0.00005
_LOOK_AFTER_TRAINER_S = 0.5
_LOOKING_IS_SHORT_S = 0.2  # an engine that looks whether a trainer is there has the lock for a moment
_STILL, _WRITTEN, _GIVEN_UP, _MAY_GO_ON = range(4)  # the cells
_NUM_BYTES = 8 * 4


class Gate:
    """`create` makes its file, by a new name in its place: who has mapped an earlier one is not disturbed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._file = path.open("r+b")
            self._looking = path.open("rb")  # a lock of its own: through the same one it would count as ours
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

    def stand_still(self, number: int, *, needs_leave: bool = False) -> float:
        """Seconds until the trainer had written; a SyncError when it was given up. `needs_leave`: and until
        `may_go_on` was said too."""
        began = time.monotonic()
        self._cells[_STILL] = number
        while self._cells[_WRITTEN] != number or (needs_leave and self._cells[_MAY_GO_ON] != number):
            if self._cells[_GIVEN_UP] == number:
                raise SyncError(
                    "the trainer did not finish writing the weights",
                    fix="let a trainer publish again (treadle run --resume), or POST /bridge/restart",
                )
            time.sleep(LOOK_S)
        return time.monotonic() - began

    def wait_until_still(self, number: int, *, is_over: Callable[[], bool]) -> bool:
        """Whether the engine stands still; False when `is_over` says that it never will."""
        while self._cells[_STILL] != number:
            if is_over():
                return self._cells[_STILL] == number
            time.sleep(LOOK_S)
        return True

    @property
    def inode(self) -> int:
        """Of its file: another one may lie in the same place by now."""
        return os.fstat(self._file.fileno()).st_ino

    @contextmanager
    def publishing(self) -> Iterator[None]:
        """The trainer's turn; one at a time."""
        deadline = time.monotonic() + _LOOKING_IS_SHORT_S
        while not _try_lock(self._file, fcntl.LOCK_EX):
            if time.monotonic() > deadline:
                raise SyncError(
                    f"another trainer publishes to this engine now (it has locked {self._path})",
                    fix="let one trainer publish to one engine",
                )
            time.sleep(LOOK_S)
        try:
            yield
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    @property
    def has_trainer(self) -> bool:
        """Whether one is publishing, and lives."""
        if not _try_lock(self._looking, fcntl.LOCK_SH):
            return True
        fcntl.flock(self._looking, fcntl.LOCK_UN)
        return False

    def go_on(self, number: int) -> None:
        self._cells[_WRITTEN] = number

    def may_go_on(self, number: int) -> None:
        self._cells[_MAY_GO_ON] = number

    def was_written(self, number: int) -> bool:
        return self._cells[_WRITTEN] == number

    def give_up(self, number: int) -> None:
        self._cells[_GIVEN_UP] = number


def _try_lock(file: IO[bytes], kind: int) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def refuse_misled(order: Adopt, served: int, gate: Gate) -> None:
    """A trainer that believes in another version, or in weights that lie elsewhere now; or none at all."""
    if order.after_version not in (None, served):
        what = f"it serves version {served}, where {order.after_version} was published last"
    elif order.gate != gate.inode:
        what = "its weights lie elsewhere than where they were attached"
    elif not gate.has_trainer:
        raise RequestError("no trainer is at the gate", fix="lock it first (sync/gate.py); trainers do")
    else:
        return
    raise RequestError(
        f"{what}: it was restarted, or another trainer publishes to it",
        fix="end the other trainer, restart the engine, then treadle run --resume",
    )


async def is_written(standing: asyncio.Future[Any], gate: Gate, number: int, timeout_s: float) -> bool:
    """For an engine that has sent somebody to `stand_still`. False: the trainer has ended before it had written, or
    takes too long."""
    deadline = awake_s() + timeout_s
    while not (await asyncio.wait({standing}, timeout=_LOOK_AFTER_TRAINER_S))[0]:
        is_left = not gate.has_trainer and not gate.was_written(number)  # in this order: it writes, then it leaves
        if is_left or awake_s() > deadline:
            return False
    return True


def gate_beside(weights_file: Path) -> Path:
    return weights_file.with_name(weights_file.name + ".gate")


def new_number() -> int:
    """Of a publish. Never 0, which is what an untouched cell holds."""
    return secrets.randbits(62) + 1
