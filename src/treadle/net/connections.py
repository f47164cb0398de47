"""Limit the connections of one HTTP server: their number, the bytes in flight, and how long each may take."""

from __future__ import annotations

import asyncio
import os
import resource
import time
from dataclasses import dataclass
from http import HTTPStatus
from typing import Protocol

import msgspec

from treadle.background import awake_s
from treadle.log import get_logger

RESERVED_FILES = 128  # for connections that are being refused, and for what the process opens later
FEWEST_CONNECTIONS = 8
ENOUGH = 0.9  # of the connections that a server wants: with fewer it logs a warning

log = get_logger("http")


@dataclass(frozen=True)
class HttpLimits:
    """`HttpLimits(max_connections=200)`. The defaults suit every client that we know of."""

    max_connections: int = 4000  # one more is answered 503 with Retry-After
    read_timeout_s: float = 30.0  # from the first byte of a request to the end of its headers
    min_body_bytes_per_s: int = 16 * 1024  # over every read_timeout_s of a body; a slower one is answered 408
    max_body_bytes_in_flight: int = 2**30  # of all requests that are not answered yet; more is answered 503
    idle_s: float = 75.0  # between two requests of a connection that is kept
    write_timeout_s: float = 60.0  # a client that reads nothing of its response for this long is disconnected
    max_head_bytes: int = 16 * 1024  # request line and headers together
    max_headers: int = 100
    max_pipelined: int = 32  # requests sent ahead, without waiting for answers
    linger_s: float = 1.0  # after a refusal we go on reading, or the client would lose the answer to a reset
    max_parting: int = 64  # connections that linger at once; more are closed at once
    sweep_s: float = 0.5  # how often the time limits are looked at


def connections_that_fit(wanted: int) -> int:
    """How many connections the limit on open files leaves room for. Raises the limit when that is allowed."""
    in_use = _open_files()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + in_use + RESERVED_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        allowed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        if allowed > soft:
            resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
            soft = allowed
    room = wanted if soft == resource.RLIM_INFINITY else min(wanted, soft - in_use - RESERVED_FILES)
    room = max(room, FEWEST_CONNECTIONS)
    if room < ENOUGH * wanted:
        log.warning(
            "fewer_connections", wanted=wanted, room=room, fix=f"raise the limit on open files: ulimit -n {needed}"
        )
    return room


def _open_files() -> int:
    try:
        return len(os.listdir("/dev/fd"))
    except OSError:
        return 64


RETRY_AFTER_S = "2"
LOG_EVERY_S = 10.0  # a flood of connections must not become a flood of log lines
SMALL_BODY_BYTES = 16 * 1024  # never refused for lack of room: leases and reports get through whatever else is sent


class HttpRefusal(Exception):
    """A request that never reaches the application. `detail` goes to the client."""

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(status)
        self.status = status
        self.detail = detail

    def answer(self) -> bytes:
        body = msgspec.json.encode({"detail": self.detail})
        retry = f"retry-after: {RETRY_AFTER_S}\r\n" if self.status == HTTPStatus.SERVICE_UNAVAILABLE else ""
        head = (
            f"HTTP/1.1 {self.status} {HTTPStatus(self.status).phrase}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n{retry}connection: close\r\n\r\n"
        )
        return head.encode() + body


class Connection(Protocol):
    def end_if_overdue(self, now: float) -> None: ...


class Connections:
    """All connections of one server: how many there are, and which of them have overstayed."""

    def __init__(self, limits: HttpLimits) -> None:
        self.limits = limits
        self.max_open = connections_that_fit(limits.max_connections)
        self._open: set[Connection] = set()
        self._parting: set[Connection] = set()  # refused or closing ones: they take no room from those that work
        self._num_refused = 0
        self._num_bodies_refused = 0
        self._logged_at = -LOG_EVERY_S
        self._body_bytes = 0  # of all requests that are not answered yet
        self.is_crowded = False  # a body found no room since the last sweep

    def admit(self, connection: Connection) -> bool:
        if len(self._open) < self.max_open:
            self._open.add(connection)
            return True
        self._num_refused += 1
        return False

    def part(self, connection: Connection) -> bool:
        """Whether this one may linger."""
        if len(self._parting) >= self.limits.max_parting and connection not in self._parting:
            return False
        self._open.discard(connection)
        self._parting.add(connection)
        return True

    def forget(self, connection: Connection) -> None:
        self._open.discard(connection)
        self._parting.discard(connection)

    def hold(self, num_bytes: int, num_held: int) -> None:
        """Count bytes of a request's body, of which `num_held` were counted before. Refused: they are not counted."""
        room = self.limits.max_body_bytes_in_flight
        if num_held + num_bytes > SMALL_BODY_BYTES and self._body_bytes + num_bytes > room:
            self._num_bodies_refused += 1
            self.is_crowded = True
            raise HttpRefusal(503, f"the bodies of unanswered requests take {room >> 20} MiB already: try again later")
        self._body_bytes += num_bytes

    def release(self, num_bytes: int) -> None:
        self._body_bytes -= num_bytes

    async def watch(self) -> None:
        """Sweep until cancelled."""
        while True:
            await asyncio.sleep(self.limits.sweep_s)
            self.sweep(awake_s())

    def sweep(self, now: float) -> None:
        for connection in [*self._open, *self._parting]:
            try:
                connection.end_if_overdue(now)
            except Exception:  # one odd connection must not take the limits off all the others
                log.error("sweep_failed", exc_info=True)
                self.forget(connection)
        self.is_crowded = False
        if (self._num_refused or self._num_bodies_refused) and time.monotonic() - self._logged_at >= LOG_EVERY_S:
            if self._num_refused:
                log.warning("connections_refused", refused=self._num_refused, limit=self.max_open)
            if self._num_bodies_refused:
                limit = self.limits.max_body_bytes_in_flight
                log.warning("bodies_refused", refused=self._num_bodies_refused, limit_bytes=limit)
            self._num_refused = self._num_bodies_refused = 0
            self._logged_at = time.monotonic()
