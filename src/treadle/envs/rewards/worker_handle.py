"""Start, use and kill one reward worker: the pool's side, and the messages that both sides exchange.

Messages are msgpack in length-prefixed frames over a socket; there is no pickle in either direction.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Sequence
from typing import Any

import msgspec

from treadle.envs.rewards.base import CallResult, Outcome, RewardInput
from treadle.errors import ConfigError, ProcessDied
from treadle.net.frames import LENGTH

IN_WORKER = "TREADLE_REWARD_WORKER"  # set in the environment of a worker
INPUTS = msgspec.msgpack.Decoder(list[RewardInput])
GRACE_S = 0.1  # accept a reply that arrived while this event loop was busy
START_LIMIT_S = 60.0
REAP_LIMIT_S = 10.0


class Setup(msgspec.Struct, tag="setup"):
    """The first message: the import path and the memory limit."""

    sys_path: list[str]
    memory_limit_mb: int


class Load(msgspec.Struct, tag="load"):
    """Import a reward and store it under a key; answered by Loaded."""

    key: int
    config: dict[str, Any]


class Work(msgspec.Struct, tag="work"):
    """Calls of a loaded reward; each is answered by a CallResult as soon as it is done, in order."""

    key: int
    calls: list[msgspec.Raw]  # the completions of each, packed by pack_inputs


class Loaded(msgspec.Struct, tag="loaded"):
    """The reward is loaded, or the problem."""

    problem: str = ""
    fix: str = ""


WorkerRequest = Setup | Load | Work
WorkerReply = Loaded | CallResult

REQUESTS = msgspec.msgpack.Decoder(WorkerRequest)
REPLIES: msgspec.msgpack.Decoder[WorkerReply] = msgspec.msgpack.Decoder(WorkerReply)


def pack_inputs(inputs: Sequence[RewardInput]) -> msgspec.Raw:
    """Encode the inputs of one call; TypeError if a data row has values that cannot be encoded."""
    return msgspec.Raw(msgspec.msgpack.encode(inputs))


def encode_frame(message: WorkerRequest | WorkerReply) -> bytes:
    body = msgspec.msgpack.encode(message)
    return LENGTH.pack(len(body)) + body


class WorkerLost(Exception):
    """The worker has died or hangs; the running call gets this outcome."""

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
        self._length: int | None = None  # of a partly read frame
        self._loaded: set[int] = set()
        self.num_calls = 0

    @classmethod
    async def start(cls, *, memory_limit_mb: int) -> Worker:
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-P", "-m", "treadle.envs.rewards.worker", str(theirs.fileno()), str(os.getpid())]
        with theirs:
            # A new session, so that it can be killed with everything that its rewards started, and does not get Ctrl-C.
            # Output of rewards goes to standard error: standard output belongs to the program.
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
        """Load the reward in the worker; ConfigError if it cannot be imported or built there."""
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
        """Send calls; `result` then returns the result of each, in order."""
        await self._send(Work(key=key, calls=calls))

    async def result(self, *, limit_s: float) -> CallResult:
        answer = await self._receive(limit_s)
        assert isinstance(answer, CallResult)  # noqa: S101  # the worker answers calls in no other way
        self.num_calls += 1
        return answer

    async def kill(self) -> None:
        """Kill it with everything that it started; returns when it is gone."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._writer.close()
        await self._process.wait()

    async def _send(self, request: WorkerRequest) -> None:
        with contextlib.suppress(OSError):  # it died: noticed by the missing reply
            self._writer.write(encode_frame(request))
            await self._writer.drain()

    async def _receive(self, limit_s: float) -> WorkerReply:
        try:
            for patience_s in (limit_s, GRACE_S):
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(patience_s):
                        return await self._read()
        except (OSError, EOFError):
            raise WorkerLost("worker_died", await self._exit_description()) from None
        raise WorkerLost("timed_out", f"took longer than {limit_s:g} s")

    async def _read(self) -> WorkerReply:
        """Read one frame. Safe to cancel at any await and to call again."""
        if self._length is None:
            (self._length,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
        body = await self._reader.readexactly(self._length)
        self._length = None
        return REPLIES.decode(body)

    async def _exit_description(self) -> str:
        """How it ended; it closed its end of the socket, so it is about to end or hangs."""
        try:
            async with asyncio.timeout(REAP_LIMIT_S):
                code = await self._process.wait()
        except TimeoutError:
            return "closed its line to the pool"
        return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
