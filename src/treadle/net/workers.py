"""Worker processes over a socket: frames, one worker process, and the base of pools of them.

A frame is eight bytes of length, then the content. A worker sends a frame when it is ready.

    class Worker(WorkerProcess): ...             one process: requests and replies of its own
    class Pool(WorkerPool[Worker]): ...          slots with one worker each, replaced when it is lost
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import socket
import struct
import sys
from collections.abc import Awaitable, Callable
from typing import IO, Generic, Self, TypeVar

from treadle.errors import ProcessDied
from treadle.log import get_logger

RESTART_DELAY_S = 0.5  # after a worker could not be started
SOCKET_BUFFER_BYTES = 2**20
READ_AHEAD_BYTES = 2**26
_LENGTH = struct.Struct("<Q")

log = get_logger("workers")


def frame(content: bytes) -> bytes:
    return _LENGTH.pack(len(content)) + content


def read_frame(line: socket.socket, max_bytes: int = sys.maxsize) -> bytearray:
    """The content of the next frame. EOFError: the other side left, or sends more than `max_bytes`."""
    (length,) = _LENGTH.unpack(_read_exactly(line, _LENGTH.size))
    if length > max_bytes:
        raise EOFError
    return _read_exactly(line, length)


def _read_exactly(line: socket.socket, num_bytes: int) -> bytearray:
    """Straight into the place where it is decoded: a body may have tens of megabytes."""
    content = bytearray(num_bytes)
    rest = memoryview(content)
    while rest:
        num_read = line.recv_into(rest)
        if num_read == 0:
            raise EOFError
        rest = rest[num_read:]
    return content


class WorkerProcess:
    """One worker process, seen from the event loop that uses it."""

    def __init__(
        self, process: asyncio.subprocess.Process, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer
        self._length: int | None = None  # of a partly read frame
        self._has_ended = False

    @classmethod
    async def _spawn(cls, module: str, *arguments: str, limit_s: float | None, stdout: IO[str] | None = None) -> Self:
        """Start `python -m MODULE FD ARGUMENTS`, and wait `limit_s` until it is ready: TimeoutError, EOFError, OSError.

        A session of its own: Ctrl-C is for this process, and the worker is killed with everything that it started.
        """
        ours, theirs = socket.socketpair()
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)
        with theirs:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", module, str(theirs.fileno()), *arguments),
                pass_fds=[theirs.fileno()],
                stdin=asyncio.subprocess.DEVNULL,
                stdout=stdout,
                start_new_session=True,
            )
        reader, writer = await asyncio.open_connection(sock=ours, limit=READ_AHEAD_BYTES)
        worker = cls(process, reader, writer)
        try:
            async with asyncio.timeout(limit_s):
                await worker._read_frame()
        except BaseException:
            await worker.end()
            raise
        return worker

    @property
    def pid(self) -> int:
        return self._process.pid

    def _write(self, *contents: bytes | bytearray) -> None:
        """Queue a frame for each content. A worker that died is noticed by the missing reply."""
        with contextlib.suppress(OSError, RuntimeError):
            self._writer.writelines(part for content in contents for part in (_LENGTH.pack(len(content)), content))

    async def _read_frame(self) -> bytes:
        """Safe to cancel at any await and to call again."""
        if self._length is None:
            (self._length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
        content = await self._reader.readexactly(self._length)
        self._length = None
        return content

    def kill(self) -> None:
        """Without `process.kill()`: it collects the exit code of a process that has ended, and asyncio then reports
        255."""
        with contextlib.suppress(OSError):
            os.killpg(self._process.pid, signal.SIGKILL)

    async def end(self) -> int:
        """Kill it with everything that it started, and return its exit code when it is gone."""
        if not self._has_ended:  # afterwards its number may be that of another process
            self.kill()
        self._writer.close()
        code = await self._process.wait()
        self._has_ended = True
        return code


W = TypeVar("W", bound=WorkerProcess)


class WorkerPool(Generic[W]):
    """Slots with at most one worker each. A subclass says in `_run_slot` what a slot does until the pool is closed."""

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers
        self._slots: list[asyncio.Task[None]] = []
        self.workers: set[W] = set()  # that run

    async def start(self) -> None:
        """Start the slots in the background."""
        self._slots = [asyncio.create_task(self._run_slot()) for _ in range(self._num_workers)]

    async def close(self) -> None:
        for slot in self._slots:
            slot.cancel()
        await asyncio.gather(*self._slots, return_exceptions=True)
        self._slots = []

    async def _run_slot(self) -> None:
        raise NotImplementedError

    async def _start_worker(self, start: Callable[[], Awaitable[W]], max_starts: int | None = None) -> W:
        """Try again after a failure, `max_starts` times in all (None: forever); then ProcessDied."""
        for attempt in itertools.count(1):
            try:
                worker = await start()
            except (OSError, EOFError, TimeoutError) as error:
                log.warning("worker_cannot_start", pool=type(self).__name__, problem=repr(error), attempt=attempt)
                if attempt == max_starts:
                    break
                await asyncio.sleep(RESTART_DELAY_S)
                continue
            self.workers.add(worker)
            return worker
        raise ProcessDied("no worker process could be started", fix="see the log: is memory short?")

    async def _stop_worker(self, worker: W) -> None:
        self.workers.discard(worker)
        await worker.end()
