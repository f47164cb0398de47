"""The porters and the line in front of them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections import deque

import msgspec

from treadle.clock import awake_s
from treadle.hub.door import Admitted, Order
from treadle.hub.porter import VERDICTS, Verdict, judge
from treadle.hub.refusals import Refused
from treadle.log import get_logger
from treadle.wire.frames import LENGTH

INLINE_BYTES = 16 * 1024  # smaller than this, the way to a porter and back costs more than the reading
IN_HAND = 2  # orders a porter has at once: one that it reads, and the next
MAX_DEATHS = 2  # a body that so many porters died of is refused
PATIENCE_S = 30.0  # for a free porter; a client that waits longer would rather try again
SILENT_S = 60.0  # a porter that has orders and says nothing for this long hangs; the largest body takes a few seconds
PAUSE_S = 0.5  # before another attempt to start a process, when the machine could not
SOCKET_BUFFER_BYTES = 2**20
log = get_logger("hub")


class Porters:
    """`await porters.admit(body, order)` -> the checked groups, or `Refused`.

    A porter that dies (out of memory, killed) is replaced, and its orders are done by another. Only the one that it was
    reading is suspected, and refused when the next porter dies of it as well; at once when it took too much CPU time.
    """

    def __init__(self, num_porters: int) -> None:
        self._num_porters = num_porters
        self._idle: asyncio.Queue[_Porter] = asyncio.Queue()
        self._places: list[asyncio.Task[None]] = []
        self.at_work: set[_Porter] = set()

    async def start(self) -> None:
        """They come as soon as they can; nobody waits for them who has nothing to be checked."""
        self._places = [asyncio.create_task(self._keep_staffed()) for _ in range(self._num_porters)]

    async def close(self) -> None:
        for place in self._places:
            place.cancel()
        await asyncio.gather(*self._places, return_exceptions=True)

    async def admit(self, body: bytes | bytearray, order: Order) -> Admitted:
        if not order.is_gzip and len(body) < INLINE_BYTES:
            return _outcome(judge(body, order))
        num_deaths = 0
        while num_deaths < MAX_DEATHS:
            porter = await self._free_porter()
            try:
                verdict = await porter.judge(body, order)
            except PorterDied as died:
                if died.while_reading and await porter.exit_code() == -signal.SIGPROF:
                    detail = f"the body takes more than {order.max_cpu_s:g} s to check: send fewer groups at once"
                    raise Refused(413, detail, reason="too_costly") from None
                num_deaths += died.while_reading
                continue
            except asyncio.CancelledError:  # the client went away; the porter answers all the same
                self._idle.put_nowait(porter)
                raise
            self._idle.put_nowait(porter)
            return _outcome(verdict)
        raise Refused(413, "the body cannot be read: it takes more memory than there is", reason="too_large")

    async def _free_porter(self) -> _Porter:
        try:
            async with asyncio.timeout(PATIENCE_S):
                while True:
                    porter = await self._idle.get()
                    if porter in self.at_work:  # not one that died meanwhile
                        return porter
        except TimeoutError:
            detail = "no process is free to check this: try again later"
            raise Refused(503, detail, {"Retry-After": "2"}, reason="no_porter") from None

    async def _keep_staffed(self) -> None:
        """One place at the door, for as long as the hub runs."""
        while True:
            try:
                porter = await _Porter.start()
            except (OSError, EOFError) as error:
                log.warning("porter_cannot_start", problem=repr(error), again_in_s=PAUSE_S)
                await asyncio.sleep(PAUSE_S)
                continue
            self.at_work.add(porter)
            for _ in range(IN_HAND):
                self._idle.put_nowait(porter)
            try:
                await porter.ended()
                log.warning("porter_died", pid=porter.pid)
            finally:
                self.at_work.discard(porter)
                await porter.dismiss()


class PorterDied(Exception):
    def __init__(self, *, while_reading: bool) -> None:
        super().__init__(while_reading)
        self.while_reading = while_reading


class _Porter:
    """One process. It greets with an empty frame, and sends another before it reads an order, then the verdict."""

    def __init__(
        self, process: asyncio.subprocess.Process, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer
        self._answers: deque[asyncio.Future[Verdict]] = deque()
        self._has_begun = False  # the first of them is being read
        self._heard_at = 0.0  # when it last said something, or got an order while it had none
        self._reading = asyncio.create_task(self._read())

    @classmethod
    async def start(cls) -> _Porter:
        ours, theirs = socket.socketpair()
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)
        command = [sys.executable, "-m", "treadle.hub.porter", str(theirs.fileno())]
        with theirs:
            # Its own session: Ctrl-C is for the hub, which still has to answer what was sent.
            process = await asyncio.create_subprocess_exec(
                *command, pass_fds=[theirs.fileno()], stdin=asyncio.subprocess.DEVNULL, start_new_session=True
            )
        writer = None
        try:
            reader, writer = await asyncio.open_connection(sock=ours, limit=2**26)
            await reader.readexactly(LENGTH.size)
        except BaseException:
            (writer or ours).close()
            await _end(process)
            raise
        return cls(process, reader, writer)

    @property
    def pid(self) -> int:
        return self._process.pid

    async def judge(self, body: bytes | bytearray, order: Order) -> Verdict:
        if self._reading.done():
            raise PorterDied(while_reading=False)
        packed = msgspec.msgpack.encode(order)
        answer: asyncio.Future[Verdict] = asyncio.get_running_loop().create_future()
        if not self._answers:
            self._heard_at = awake_s()
        self._answers.append(answer)
        with contextlib.suppress(OSError, RuntimeError):  # it died: the answer tells
            # Without drain(), which would wait for ever for a porter that hangs.
            self._writer.writelines((LENGTH.pack(len(packed)), LENGTH.pack(len(body)), packed, body))
        while not answer.done() and (left_s := self._heard_at + SILENT_S - awake_s()) > 0:
            await asyncio.wait([answer], timeout=left_s)
        if not answer.done():  # it hangs: the next porter tells whether the body is to blame
            _kill(self._process)
        return await answer

    async def exit_code(self) -> int:
        """Kill the process if it still runs, and return its exit code."""
        return await _end(self._process)

    async def ended(self) -> None:
        """Returns when the process is gone."""
        await asyncio.wait([self._reading])

    async def _read(self) -> None:
        """Answers come in the order of the orders."""
        try:
            while True:
                (length,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
                self._heard_at = awake_s()
                if length == 0:
                    self._has_begun = True
                    continue
                verdict = VERDICTS.decode(await self._reader.readexactly(length))
                self._has_begun = False
                answer = self._answers.popleft()
                if not answer.done():  # its client may have gone away
                    answer.set_result(verdict)
        except (OSError, EOFError):
            pass
        finally:  # whatever ended it, nobody may wait for an answer that does not come
            for place, answer in enumerate(self._answers):
                if not answer.done():
                    answer.set_exception(PorterDied(while_reading=self._has_begun and place == 0))

    async def dismiss(self) -> None:
        """Kill it: it holds nothing that could be lost."""
        self._reading.cancel()
        self._writer.close()
        await _end(self._process)


def _kill(process: asyncio.subprocess.Process) -> None:
    """Without `process.kill()`: it collects the exit code of a process that has ended, and asyncio then reports 255."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)


async def _end(process: asyncio.subprocess.Process) -> int:
    """Kill it and collect its exit code: asyncio warns of a child that outlives its event loop."""
    _kill(process)
    return await process.wait()


def _outcome(verdict: Verdict) -> Admitted:
    if verdict.admitted is None:
        raise Refused(verdict.status, verdict.detail, reason=verdict.reason, env_id=verdict.env_id)
    return verdict.admitted
