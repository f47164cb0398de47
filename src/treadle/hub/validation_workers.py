"""Worker processes that validate posted groups, so that the hub's event loop never decodes a large body.

A worker (`python -m treadle.hub.validation_workers FD`) reads requests from a socket and answers each with a result. It
sends an empty frame when it is ready, and another when it starts a request, so that the hub knows which body it was
validating when it died. A body that takes too much CPU time ends the process with SIGPROF: nothing inside the process
could interrupt a decoder written in C.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import sys
import traceback
from collections import deque
from dataclasses import dataclass
from typing import Any

import msgspec

from treadle.background import awake_s
from treadle.hub.group_validation import Admitted, ValidationRequest, admit
from treadle.hub.messages import Refused
from treadle.log import get_logger
from treadle.net.workers import WorkerPool, WorkerProcess, frame, read_frame

# ---- in the worker

EMPTY = frame(b"")


class ValidationResult(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The validated groups, or the refusal."""

    admitted: Admitted | None = None
    status: int = 0
    detail: Any = None
    reason: str = ""
    env_id: int | None = None  # of the group that was refused, when it is an environment's


REQUESTS = msgspec.msgpack.Decoder(ValidationRequest)
RESULTS = msgspec.msgpack.Decoder(ValidationResult)


def validate(body: bytes | bytearray, request: ValidationRequest) -> ValidationResult:
    try:
        return ValidationResult(admitted=admit(body, request))
    except Refused as refused:
        return ValidationResult(
            status=refused.status, detail=refused.detail, reason=refused.reason, env_id=refused.env_id
        )
    except MemoryError:
        return ValidationResult(status=413, detail="the body takes more memory than there is", reason="too_large")
    except Exception:  # process boundary: an unforeseen body must not end the worker
        traceback.print_exc()
        return ValidationResult(status=500, detail="internal error", reason="internal_error")


def main(fd: int) -> None:
    with socket.socket(fileno=fd) as line:
        line.sendall(EMPTY)
        with contextlib.suppress(EOFError):  # the hub is gone
            while True:
                request, body = REQUESTS.decode(read_frame(line)), read_frame(line)
                line.sendall(EMPTY)
                signal.setitimer(signal.ITIMER_PROF, request.max_cpu_s)
                result = msgspec.msgpack.encode(validate(body, request))
                signal.setitimer(signal.ITIMER_PROF, 0.0)
                line.sendall(frame(result))


if __name__ == "__main__":
    main(int(sys.argv[1]))


# ---- in the hub

INLINE_BYTES = 16 * 1024  # smaller bodies are validated in the hub: the round trip to a worker would cost more
REQUESTS_PER_WORKER = 2  # the one that it validates, and the next
MAX_DEATHS = 2  # workers that may die of one body before it is refused
QUEUE_TIMEOUT_S = 30.0  # longest wait for a free worker; then the client is asked to retry
SILENT_S = 60.0  # a busy worker that sends nothing for this long hangs; the largest body takes a few seconds
log = get_logger("hub")


class ValidationWorkers(WorkerPool["_Worker"]):
    """`await validators.admit(body, request)` -> the checked groups, or `Refused`.

    A worker that dies (out of memory, killed) is replaced, and another takes over its requests. Only the body that it
    was validating is suspected: it is refused when the next worker dies of it too, or at once for too much CPU time.
    """

    def __init__(self, num_workers: int) -> None:
        super().__init__(num_workers)
        self._idle: asyncio.Queue[_Worker] = asyncio.Queue()

    async def admit(self, body: bytes | bytearray, request: ValidationRequest) -> Admitted:
        if not request.is_gzip and len(body) < INLINE_BYTES:
            return _outcome(validate(body, request))
        num_deaths = 0
        while num_deaths < MAX_DEATHS:
            worker = await self._free_worker()
            try:
                result = await worker.validate(body, request)
            except WorkerDied as died:
                if died.while_reading and await worker.end() == -signal.SIGPROF:
                    detail = f"the body takes more than {request.max_cpu_s:g} s to check: send fewer groups at once"
                    raise Refused(413, detail, reason="too_costly") from None
                num_deaths += died.while_reading
                continue
            except asyncio.CancelledError:  # the client went away; the worker answers all the same
                self._idle.put_nowait(worker)
                raise
            self._idle.put_nowait(worker)
            return _outcome(result)
        raise Refused(413, "the body cannot be read: it takes more memory than there is", reason="too_large")

    async def _free_worker(self) -> _Worker:
        try:
            async with asyncio.timeout(QUEUE_TIMEOUT_S):
                while True:
                    worker = await self._idle.get()
                    if worker in self.workers:  # not one that died meanwhile
                        return worker
        except TimeoutError:
            detail = "no process is free to check this: try again later"
            raise Refused(503, detail, {"Retry-After": "2"}, reason="no_worker") from None

    async def _run_slot(self) -> None:
        """Run one worker after another until the hub stops."""
        while True:
            worker = await self._start_worker(_Worker.start)
            for _ in range(REQUESTS_PER_WORKER):
                self._idle.put_nowait(worker)
            try:
                await worker.ended()
                log.warning("validation_worker_died", pid=worker.pid)
            finally:
                await self._stop_worker(worker)


@dataclass(eq=False)
class WorkerDied(Exception):
    while_reading: bool


class _Worker(WorkerProcess):
    """One worker process, seen from the hub."""

    def __init__(
        self, process: asyncio.subprocess.Process, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        super().__init__(process, reader, writer)
        self._answers: deque[asyncio.Future[ValidationResult]] = deque()
        self._has_begun = False  # whether the first of them is being validated
        self._heard_at = 0.0  # when it last sent something, or got a request while idle
        self._reading: asyncio.Task[None]

    @classmethod
    async def start(cls) -> _Worker:
        worker = await cls._spawn("treadle.hub.validation_workers", limit_s=None)
        worker._reading = asyncio.create_task(worker._read())
        return worker

    async def validate(self, body: bytes | bytearray, request: ValidationRequest) -> ValidationResult:
        if self._reading.done():
            raise WorkerDied(while_reading=False)
        packed = msgspec.msgpack.encode(request)
        answer: asyncio.Future[ValidationResult] = asyncio.get_running_loop().create_future()
        if not self._answers:
            self._heard_at = awake_s()
        self._answers.append(answer)
        self._write(packed, body)  # no drain(): it would wait for ever for a worker that hangs
        while not answer.done() and (left_s := self._heard_at + SILENT_S - awake_s()) > 0:
            await asyncio.wait([answer], timeout=left_s)
        if not answer.done():  # it hangs: the next worker shows whether the body is the cause
            self.kill()
        return await answer

    async def ended(self) -> None:
        """Returns when the process is gone."""
        await asyncio.wait([self._reading])

    async def _read(self) -> None:
        """Results come in the order of the requests."""
        try:
            while True:
                content = await self._read_frame()
                self._heard_at = awake_s()
                if not content:
                    self._has_begun = True
                    continue
                result = RESULTS.decode(content)
                self._has_begun = False
                answer = self._answers.popleft()
                if not answer.done():  # its client may have gone away
                    answer.set_result(result)
        except (OSError, EOFError):
            pass
        finally:  # no caller may wait for a result that does not come
            for place, answer in enumerate(self._answers):
                if not answer.done():
                    answer.set_exception(WorkerDied(while_reading=self._has_begun and place == 0))


def _outcome(result: ValidationResult) -> Admitted:
    if result.admitted is None:
        raise Refused(result.status, result.detail, reason=result.reason, env_id=result.env_id)
    return result.admitted
