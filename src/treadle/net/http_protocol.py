"""HTTP/1.1 for clients that are slow, greedy or broken: uvicorn's httptools protocol with limits around it.

The parser (llhttp) is strict; what it lets pass and we do not is refused here. Time limits are not timers of each
connection: one sweep looks at all of them twice a second, so that no path through the protocol can forget one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from enum import Enum, auto
from functools import partial
from typing import Any, cast
from urllib.parse import urlsplit

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from treadle.background import awake_s
from treadle.log import get_logger
from treadle.net.connections import SMALL_BODY_BYTES, Connections, HttpRefusal

FLUSHED = "treadle.flushed"  # in a request's scope: `await scope[FLUSHED]()` after the answer was sent
HELD_BYTES = "treadle.held_bytes"  # in a request's scope: how much of its body is counted in `Connections`
READ_AHEAD_BYTES = 2**19  # of a body that the application has not asked for yet
FRAMING_FACTOR = 8  # the smallest chunk, "1\r\nx\r\n", is five bytes of framing around one of data

log = get_logger("http")


class RequestPart(Enum):
    """What the next byte of a connection would be part of."""

    NOTHING = auto()  # the start of a next request
    HEAD = auto()
    BODY = auto()


def protocol_of(connections: Connections) -> type[asyncio.Protocol]:
    """What uvicorn calls for each connection; to it a class."""

    def accept(**arguments: Any) -> LimitedHttp:
        return LimitedHttp(connections, **arguments)

    return cast(type[asyncio.Protocol], accept)


class LimitedHttp(HttpToolsProtocol):
    """One connection."""

    def __init__(
        self,
        connections: Connections,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._application, self.app = self.app, self._run_application
        self._all = connections
        self._limits = connections.limits
        self._now: Callable[[], float] = awake_s
        self._arriving = RequestPart.NOTHING
        self._head_bytes = 0  # of the request that arrives now: what the parser has handed over
        self._pending_bytes = 0  # and what came since its head began, finished or not
        self._body_bytes = 0
        self._framing_bytes = 0
        self._body_began = self._window_began = 0.0  # the rate of a body is looked at in windows of read_timeout_s
        self._window_from = 0  # bytes of the body that came before the window
        self._has_begun_another = False  # a request began within the bytes that are being read
        self._drained = asyncio.Event()  # the system has everything that was written
        self._drained.set()
        self._is_lost_unsent = False
        self._is_turned_away = False  # one too many: answered 503 as soon as it asks for something
        self._is_deaf = False  # whatever comes is thrown away
        self.is_parting = False
        self._ends_after_answers = False
        self._deadline = 0.0
        self._unsent = 0
        self._sent_some_at = 0.0

    # The connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)  # writing pauses as long as anything waits to be sent
        now = self._now()
        self._deadline = now + self._limits.read_timeout_s
        if not self._all.admit(self):
            self._is_turned_away = True
            self._deadline = now + self._limits.linger_s
            if not self._all.part(self):
                self._turn_away()

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_lost_unsent = not self._drained.is_set()
        self._drained.set()
        self._all.forget(self)
        for cycle, _ in self.pipeline:  # they are never run
            self._release_body(cycle.scope)
        self._unset_keepalive_if_required()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_turned_away and not self._is_deaf:
            self._turn_away()
        if self._is_deaf or self.transport.is_closing():
            return
        self._unset_keepalive_if_required()
        was_arriving, body_bytes_before = self._arriving, self._body_bytes
        self._has_begun_another = False
        try:
            self.parser.feed_data(data)
            self._check_unfinished(was_arriving, len(data), body_bytes_before)
        except httptools.HttpParserUpgrade:
            self._is_deaf = True  # served as plain HTTP, and closed after the answer; what follows is not HTTP
        except httptools.HttpParserError as error:
            raised = error.__context__  # by a callback: the parser raises its own error in its place
            invalid = HttpRefusal(400, f"this is not a valid HTTP/1.1 request: {error}")
            self._refuse(raised if isinstance(raised, HttpRefusal) else invalid)
        except HttpRefusal as refusal:
            self._refuse(refusal)

    def _check_unfinished(self, was_arriving: RequestPart, num_bytes: int, body_bytes_before: int) -> None:
        """The parser keeps what is not finished; a header or trailer without end would fill the memory."""
        if self._arriving is not was_arriving or self._has_begun_another:
            return  # how the bytes divide is not known; the next read tells
        if self._arriving is RequestPart.HEAD:
            self._pending_bytes += num_bytes
            self._check_head_size(self._pending_bytes)
        elif self._arriving is RequestPart.BODY:
            self._framing_bytes += num_bytes - (self._body_bytes - body_bytes_before)
            if self._framing_bytes > self._limits.max_head_bytes + FRAMING_FACTOR * self._body_bytes:
                raise HttpRefusal(
                    400, "the body has more chunk framing than data: send larger chunks, without extensions"
                )

    # What the parser finds

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._has_begun_another = True
        self._arriving = RequestPart.HEAD
        self._deadline = self._now() + self._limits.read_timeout_s
        self._head_bytes = self._pending_bytes = self._body_bytes = self._framing_bytes = 0

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._head_bytes += len(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_bytes += len(name) + len(value) + len(": \r\n")
        self._check_head_size(self._head_bytes)
        if len(self.headers) >= self._limits.max_headers:
            raise HttpRefusal(431, f"the request has more than {self._limits.max_headers} headers")
        if self._arriving is RequestPart.HEAD:  # trailers are dropped: they come when the headers were checked already
            super().on_header(name, value.strip())

    def on_headers_complete(self) -> None:
        self._check_head()
        self._arriving = RequestPart.BODY
        super().on_headers_complete()
        outlet = _ResponseWriter(self)
        self.cycle.transport = cast(asyncio.Transport, outlet)
        cast(dict[str, Any], self.scope).update({FLUSHED: partial(self._flushed, self.cycle, outlet), HELD_BYTES: 0})
        self._body_began = self._now()
        self._begin_window(self._body_began)
        if self.expect_100_continue or self.parser.should_upgrade():
            # A client that is refused before it sent its body sends it or does not: nobody can tell where the next
            # request starts.
            self.cycle.keep_alive = False

    def on_body(self, body: bytes) -> None:
        """As uvicorn's, with more room: at its 64 KiB, reading a large body stops and starts again all the time."""
        self._body_bytes += len(body)
        if self.parser.should_upgrade() or self.cycle.response_complete:
            return
        scope = cast(dict[str, Any], self.scope)
        self._all.hold(len(body), scope[HELD_BYTES])
        scope[HELD_BYTES] += len(body)
        self.cycle.body += body
        if len(self.cycle.body) > READ_AHEAD_BYTES:
            self.flow.pause_reading()
        self.cycle.message_event.set()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._arriving = RequestPart.NOTHING
        self._deadline = self._now() + self._limits.idle_s

    def _check_head_size(self, num_bytes: int) -> None:
        if num_bytes > self._limits.max_head_bytes:
            raise HttpRefusal(431, f"the request line and headers are larger than {self._limits.max_head_bytes} bytes")

    def _check_head(self) -> None:
        """What the parser lets pass and RFC 9112 does not, or what two servers could read in two ways."""
        version = self.parser.get_http_version()
        if version not in ("1.0", "1.1"):
            raise HttpRefusal(400, "only HTTP/1.1 and HTTP/1.0 are spoken here")
        values: dict[bytes, list[bytes]] = {}
        for name, value in self.headers:
            values.setdefault(name, []).append(value)
        hosts = values.get(b"host", [])
        if len(hosts) > 1 or (version == "1.1" and not hosts):
            raise HttpRefusal(400, "send exactly one Host header")
        encodings = values.get(b"transfer-encoding", [])
        if encodings and (version == "1.0" or [each.lower() for each in encodings] != [b"chunked"]):
            raise HttpRefusal(400, "the only Transfer-Encoding is chunked, and it needs HTTP/1.1")
        has_body = encodings or values.get(b"content-length", [b"0"]) != [b"0"]
        if has_body and self.parser.should_upgrade():
            raise HttpRefusal(400, "a request to change the protocol must not have a body")
        if any(each.lower() != b"100-continue" for each in values.get(b"expect", [])):
            raise HttpRefusal(417, "the only expectation that is understood is 100-continue")
        self._check_target(hosts)
        if len(self.pipeline) >= self._limits.max_pipelined:
            raise HttpRefusal(400, f"more than {self._limits.max_pipelined} requests were sent ahead")

    def _check_target(self, hosts: list[bytes]) -> None:
        if b"#" in self.url:
            raise HttpRefusal(400, "a request's target has no #fragment")
        if self.url.startswith(b"/"):
            return
        try:
            target = urlsplit(self.url.decode("ascii"))
            is_same = target.scheme == "http" and target.netloc.lower().encode() == b"".join(hosts).lower()
        except ValueError:
            is_same = False
        if not is_same or not target.path:
            raise HttpRefusal(400, "a request's target is a path, or a URL with the host of the Host header")

    # Answers

    async def _run_application(self, scope: Any, receive: Any, send: Any) -> None:
        """A body counts until the application is done with it, also when its client has left before."""
        try:
            await self._application(scope, receive, send)
        finally:
            self._release_body(scope)

    def _release_body(self, scope: Any) -> None:
        self._all.release(scope.pop(HELD_BYTES))

    async def _flushed(self, cycle: Any, outlet: _ResponseWriter) -> bool:
        """Whether this answer left: True once the system has all of it, False when the client went away before."""
        if not cycle.response_complete or outlet.was_closed:
            return False
        await self._drained.wait()
        return not self._is_lost_unsent

    def pause_writing(self) -> None:
        self._drained.clear()
        super().pause_writing()

    def resume_writing(self) -> None:
        self._drained.set()
        super().resume_writing()

    def on_response_complete(self) -> None:
        if self._ends_after_answers and not self.pipeline:
            self.part()
        if self.is_parting:
            self.server_state.total_requests += 1
            return
        super().on_response_complete()
        wait_s = self._limits.idle_s if self._arriving is RequestPart.NOTHING else self._limits.read_timeout_s
        self._deadline = self._now() + wait_s

    def _refuse(self, refusal: HttpRefusal) -> None:
        """Answer in place of the application, and close."""
        log.debug("refused", status=refusal.status, detail=refusal.detail)
        self._is_deaf = True
        is_in_body = self._arriving is RequestPart.BODY
        if self._is_answering() and (self.pipeline or not is_in_body):
            # Earlier requests of this connection get their answers first; this one gets none.
            if is_in_body:
                cycle, _ = self.pipeline.popleft()
                self._release_body(cycle.scope)
            self._ends_after_answers = True
            return
        if self._is_answering():
            self.cycle.disconnected = True
            self.cycle.message_event.set()
            if self.cycle.response_started:
                self.transport.abort()
                return
        if not self.is_parting:
            self.transport.write(refusal.answer())
        self.part()

    def _turn_away(self) -> None:
        self._is_deaf = True
        self.transport.write(HttpRefusal(503, "too many connections are open: try again later").answer())
        self.part()

    def part(self) -> None:
        """Close in a way that lets the client read what was written, even when it is still sending."""
        if self.is_parting or self.transport.is_closing():
            return
        self.is_parting = True
        self._unset_keepalive_if_required()
        self._deadline = self._now() + self._limits.linger_s
        may_be_sending = self._is_deaf or self._arriving is not RequestPart.NOTHING
        if not (may_be_sending and self._all.part(self)):
            self.transport.close()
            return
        self._is_deaf = True
        self.flow.resume_reading()
        self.transport.write_eof()

    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    # Time

    def end_if_overdue(self, now: float) -> None:
        if self._is_stuck(now):
            self.transport.abort()
        elif self._unsent or self.transport.is_closing():
            self._deadline = max(self._deadline, now + self._limits.linger_s)
        elif self._is_answering() and not self.is_parting:
            self._end_if_body_is_slow(now)
        elif now >= self._deadline:
            self._time_out()

    def _is_stuck(self, now: float) -> bool:
        """Whether the client has taken nothing of what waits for it. `close()` alone would wait for it for ever."""
        unsent = self.transport.get_write_buffer_size()
        if unsent == 0 or unsent < self._unsent or self._unsent == 0:
            self._sent_some_at = now
        self._unsent = unsent
        return now - self._sent_some_at >= self._limits.write_timeout_s

    def _begin_window(self, now: float) -> None:
        self._window_began, self._window_from = now, self._body_bytes

    def _end_if_body_is_slow(self, now: float) -> None:
        """A body must end or keep the lowest rate in every window: a byte now and then does not keep it open.

        While others find no room, a large one must end within read_timeout_s.
        """
        if self._arriving is not RequestPart.BODY or self._is_deaf:
            return
        patience_s, slowest = self._limits.read_timeout_s, self._limits.min_body_bytes_per_s
        seconds, is_large = now - self._window_began, self._body_bytes > SMALL_BODY_BYTES
        if self._all.is_crowded and is_large and now - self._body_began >= patience_s:
            self._refuse(HttpRefusal(503, "the body takes long, and others find no room: try again later"))
        elif self.flow.read_paused or self.cycle.waiting_for_100_continue:
            self._begin_window(now)  # the client waits for us
        elif seconds >= patience_s:
            if self._body_bytes - self._window_from < slowest * seconds:
                self._refuse(HttpRefusal(408, f"the body arrives too slowly: send at least {slowest} bytes a second"))
            self._begin_window(now)

    def _time_out(self) -> None:
        if self._is_turned_away and not self.is_parting:
            self._turn_away()
        elif self.is_parting or self._arriving is RequestPart.BODY:
            self.transport.abort()
        elif self._arriving is RequestPart.HEAD:
            self._refuse(HttpRefusal(408, f"the headers did not arrive within {self._limits.read_timeout_s:g} s"))
        else:
            self.transport.close()


class _ResponseWriter:
    """The transport as one answer sees it. Head and body leave together, and closing leaves time to read them."""

    def __init__(self, connection: LimitedHttp) -> None:
        self._connection = connection
        self._head: bytes | None = None  # waits for the body, but no longer than until the event loop's next turn
        self._is_started = False
        self.was_closed = False  # before everything was written

    def write(self, data: bytes) -> None:
        if self.is_closing():
            self.was_closed = True
            return
        if self._head is not None:
            head, self._head = self._head, None
            self._connection.transport.writelines((head, data))
        elif self._is_started or data.startswith(b"HTTP/1.1 100 "):
            self._connection.transport.write(data)
        else:
            self._is_started = True
            self._head = data
            self._connection.loop.call_soon(self._send_head)

    def is_closing(self) -> bool:
        return self._connection.is_parting or self._connection.transport.is_closing()

    def close(self) -> None:
        self._send_head()
        self._connection.part()

    def _send_head(self) -> None:
        if self._head is not None:
            self.write(b"")
