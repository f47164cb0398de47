"""All connections of one server: how many there may be, how much they may send, which of them overstay."""

from __future__ import annotations

import asyncio
import time
from http import HTTPStatus
from typing import Protocol

import msgspec

from treadle.clock import awake_s
from treadle.log import get_logger
from treadle.wire.http_limits import HttpLimits, connections_that_fit

RETRY_AFTER_S = "2"
LOG_EVERY_S = 10.0  # a flood of connections must not become a flood of log lines
SMALL_BODY_BYTES = 16 * 1024  # never refused for lack of room: leases and reports get through whatever else is sent

log = get_logger("http")


class Refusal(Exception):
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
            raise Refusal(503, f"the bodies of unanswered requests take {room >> 20} MiB already: try again later")
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
