"""The pool's side of one worker: start it, load rewards into it, hand it calls, kill it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from typing import Any

import msgspec

from treadle.envs.rewards.messages import ANSWERS, Answer, Load, Loaded, Order, Setup, Work, frame
from treadle.envs.rewards.outcome import CallResult, Outcome
from treadle.errors import ConfigError, ProcessDied
from treadle.net.frames import LENGTH

GRACE_S = 0.1  # an answer that arrived while our own event loop was busy still counts
START_LIMIT_S = 60.0
REAP_LIMIT_S = 10.0


class WorkerLost(Exception):
    """The worker is gone, or hangs and must go; the call it was at gets this outcome."""

    def __init__(self, outcome: Outcome, detail: str) -> None:
        super().__init__(detail)
        self.outcome = outcome
        self.detail = detail


class Worker:
    def __init__(
        self, process: asyncio.subprocess.Process, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer
        self._length: int | None = None  # of a frame that has begun
        self._loaded: set[int] = set()
        self.num_calls = 0

    @classmethod
    async def start(cls, *, memory_limit_mb: int) -> Worker:
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-P", "-m", "treadle.envs.rewards.worker", str(theirs.fileno()), str(os.getpid())]
        with theirs:
            # Its own session, so that it can be killed with all that its rewards started, and Ctrl-C stays ours. What a
            # reward prints goes to standard error: standard output belongs to the program.
            process = await asyncio.create_subprocess_exec(
                *command,
                pass_fds=[theirs.fileno()],
                stdin=asyncio.subprocess.DEVNULL,
                stdout=sys.__stderr__,
                start_new_session=True,
            )
        reader, writer = await asyncio.open_connection(sock=ours)
        worker = cls(process, reader, writer)
        try:
            await worker._receive(START_LIMIT_S)
            await worker._send(Setup(sys_path=sys.path, memory_limit_mb=memory_limit_mb))
        except BaseException:
            await worker.kill()
            raise
        return worker

    @property
    def pid(self) -> int:
        return self._process.pid

    async def load(self, key: int, config: dict[str, Any], *, limit_s: float) -> None:
        """Bring the reward into the worker; ConfigError when it cannot be imported or made there."""
        if key in self._loaded:
            return
        try:
            await self._send(Load(key=key, config=config))
            answer = await self._receive(limit_s)
        except WorkerLost as lost:
            raise ProcessDied(
                f"the reward '{config['name']}' could not be loaded: the worker {lost.detail}",
                fix="see what it wrote to standard error above",
            ) from None
        if isinstance(answer, Loaded) and answer.problem:
            raise ConfigError(f"the reward '{config['name']}' could not be loaded: {answer.problem}", fix=answer.fix)
        self._loaded.add(key)

    async def begin(self, key: int, calls: list[msgspec.Raw]) -> None:
        """Hand over calls; `result` then has the result of each, in order."""
        await self._send(Work(key=key, calls=calls))

    async def result(self, *, limit_s: float) -> CallResult:
        answer = await self._receive(limit_s)
        assert isinstance(answer, CallResult)  # noqa: S101  # the worker answers calls in no other way
        self.num_calls += 1
        return answer

    async def kill(self) -> None:
        """End it and all that it started; returns when it is gone."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._writer.close()
        await self._process.wait()

    async def _send(self, order: Order) -> None:
        with contextlib.suppress(OSError):  # it died: the missing answer tells
            self._writer.write(frame(order))
            await self._writer.drain()

    async def _receive(self, limit_s: float) -> Answer:
        try:
            for patience_s in (limit_s, GRACE_S):
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(patience_s):
                        return await self._read()
        except (OSError, EOFError):
            raise WorkerLost("worker_died", await self._obituary()) from None
        raise WorkerLost("timed_out", f"took longer than {limit_s:g} s")

    async def _read(self) -> Answer:
        """One frame. It may be given up at any await and asked for again: nothing is lost."""
        if self._length is None:
            (self._length,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
        body = await self._reader.readexactly(self._length)
        self._length = None
        return ANSWERS.decode(body)

    async def _obituary(self) -> str:
        """How it ended. It closed its end of the line, so it is ending or must be made to."""
        try:
            async with asyncio.timeout(REAP_LIMIT_S):
                code = await self._process.wait()
        except TimeoutError:
            return "closed its line to the pool"
        return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
