"""Start, use and kill one reward worker: the pool's side, and the messages that both sides exchange.

Messages are msgpack in length-prefixed frames over a socket; there is no pickle in either direction.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

import msgspec

from treadle.envs.rewards.base import CallResult, Outcome, RewardInput
from treadle.errors import ConfigError, ProcessDied
from treadle.net.workers import WorkerProcess

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


class WorkerLost(Exception):
    """The worker has died or hangs; the running call gets this outcome."""

    def __init__(self, outcome: Outcome, detail: str) -> None:
        super().__init__(detail)
        self.outcome = outcome
        self.detail = detail


class Worker(WorkerProcess):
    def __init__(
        self, process: asyncio.subprocess.Process, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        super().__init__(process, reader, writer)
        self._loaded: set[int] = set()
        self.num_calls = 0

    @classmethod
    async def start(cls, *, memory_limit_mb: int) -> Worker:
        # Output of rewards goes to standard error: standard output belongs to the program.
        module, parent = "treadle.envs.rewards.worker", str(os.getpid())
        worker = await cls._spawn(module, parent, limit_s=START_LIMIT_S, stdout=sys.__stderr__)
        worker._send(Setup(sys_path=sys.path, memory_limit_mb=memory_limit_mb))
        return worker

    async def load(self, key: int, config: dict[str, Any], *, limit_s: float) -> None:
        """Load the reward in the worker; ConfigError if it cannot be imported or built there."""
        if key in self._loaded:
            return
        try:
            self._send(Load(key=key, config=config))
            answer = await self._receive(limit_s)
        except WorkerLost as lost:
            raise ProcessDied(
                f"the reward '{config['name']}' could not be loaded: the worker {lost.detail}",
                fix="see what it wrote to standard error above",
            ) from None
        if isinstance(answer, Loaded) and answer.problem:
            raise ConfigError(f"the reward '{config['name']}' could not be loaded: {answer.problem}", fix=answer.fix)
        self._loaded.add(key)

    def begin(self, key: int, calls: list[msgspec.Raw]) -> None:
        """Send calls; `result` then returns the result of each, in order."""
        self._send(Work(key=key, calls=calls))

    async def result(self, *, limit_s: float) -> CallResult:
        answer = await self._receive(limit_s)
        assert isinstance(answer, CallResult)  # noqa: S101  # the worker answers calls in no other way
        self.num_calls += 1
        return answer

    def _send(self, request: WorkerRequest) -> None:
        self._write(msgspec.msgpack.encode(request))

    async def _receive(self, limit_s: float) -> WorkerReply:
        try:
            for patience_s in (limit_s, GRACE_S):
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(patience_s):
                        return REPLIES.decode(await self._read_frame())
        except (OSError, EOFError):
            raise WorkerLost("worker_died", await self._exit_description()) from None
        raise WorkerLost("timed_out", f"took longer than {limit_s:g} s")

    async def _exit_description(self) -> str:
        """How it ended; it closed its end of the socket, so it is about to end or hangs."""
        try:
            async with asyncio.timeout(REAP_LIMIT_S):
                code = await self._process.wait()
        except TimeoutError:
            return "closed its line to the pool"
        return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
