"""Serving HTTP: one way to serve on a port that was taken, until told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import math
import signal
import socket
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import uvicorn
import uvloop
from starlette.responses import JSONResponse

from treadle.wire.http_connections import Connections
from treadle.wire.http_limits import HttpLimits
from treadle.wire.http_protocol import protocol_of

DEFAULT_LIMITS = HttpLimits()


def is_loopback(url: str) -> bool:
    """Whether a URL names this machine: a proxy meant for the internet must not swallow calls to it."""
    return urlsplit(url).hostname in ("127.0.0.1", "localhost", "::1")


def serve_until_stopped(
    app: Any,
    listener: socket.socket,
    on_stop: Callable[[], None],
    limits: HttpLimits = DEFAULT_LIMITS,
) -> None:
    """Serve until SIGTERM or SIGINT. `on_stop` must end what waits, so that every client still gets an answer."""
    connections = Connections(limits)
    settings = server_settings(app, connections, limits)
    # What there is by now stays. With torch and transformers it is 400,000 objects, and every request waited 0.2 s
    # each time that they were looked through for garbage.
    gc.collect()
    gc.freeze()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(SignalFreeServer(settings), listener, on_stop, connections))


def server_settings(app: Any, connections: Connections, limits: HttpLimits, **more: Any) -> uvicorn.Config:
    """uvicorn, as each of our servers wants it."""
    return uvicorn.Config(
        RefuseWebPages(app),
        http=protocol_of(connections),
        ws="none",
        log_level="warning",
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,
        proxy_headers=False,  # a header must not be able to say that its sender is on this machine
        timeout_keep_alive=math.ceil(limits.idle_s),
        timeout_graceful_shutdown=1,  # for clients that do not read their answer
        **more,
    )


class RefuseWebPages:
    """No request that a foreign web page made is served: whoever opens one must not be able to wipe or pause a run.

    Browsers mark such requests with Sec-Fetch-Site or Origin; our clients, curl and Atropos' send neither. A page that
    a person typed the address of comes with "none". A page of our own may read (its scripts come with an Origin, which
    is the name it was asked for by), and nothing else.
    """

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        headers = dict(scope.get("headers", ()))
        origin = headers.get(b"origin")
        is_foreign = origin is not None and not (scope.get("method") == "GET" and _is_own(origin, headers))
        if is_foreign or headers.get(b"sec-fetch-site", b"none") not in (b"none", b"same-origin"):
            detail = "requests of web pages are refused: call from a program, or open the address itself"
            await JSONResponse({"detail": detail}, 403)(scope, receive, send)
        else:
            await self._app(scope, receive, send)


def _is_own(origin: bytes, headers: dict[bytes, bytes]) -> bool:
    """There is no TLS here; who puts a proxy with TLS before us has https in the page's address."""
    host = headers.get(b"host")
    return host is not None and origin in (b"http://" + host, b"https://" + host)


class SignalFreeServer(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are ours: uvicorn would raise them again after its shutdown, and not end with 0."""
        yield


async def _serve(
    server: SignalFreeServer, listener: socket.socket, on_stop: Callable[[], None], connections: Connections
) -> None:
    def stop() -> None:
        on_stop()
        server.should_exit = True

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    watch = loop.create_task(connections.watch())
    try:
        await server.serve(sockets=[listener])
    finally:
        watch.cancel()
