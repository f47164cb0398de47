"""Serving HTTP: one way to take a port, and one way to serve on it until told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import signal
import socket
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import uvicorn
from starlette.responses import Response

from treadle.errors import ConfigError, PortInUse


def take_port(host: str, port: int) -> socket.socket:
    """A listening socket, taken before anything slow is done: a second process ends having touched nothing."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With the protocol named, asyncio sends small answers at once; without it each waits 40 ms (Nagle).
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(socket.SOMAXCONN)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            fix = "stop the program that listens there, or choose another port with --port"
            raise PortInUse(f"port {port} on {host} is in use", fix=fix) from None
        fix = "choose another with --host or --port; ports below 1024 need privileges"
        raise ConfigError(f"cannot listen on {host} port {port}", fix=fix) from error
    return listener


def is_loopback(url: str) -> bool:
    """Whether a URL names this machine: a proxy meant for the internet must not swallow calls to it."""
    return urlsplit(url).hostname in ("127.0.0.1", "localhost", "::1")


def serve_until_stopped(app: Any, listener: socket.socket, on_stop: Callable[[], None]) -> None:
    """Serve until SIGTERM or SIGINT. `on_stop` must end what waits, so that every client still gets an answer."""
    settings = uvicorn.Config(
        RefuseWebPages(app),
        log_level="warning",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=1,  # for clients that do not read their answer
    )
    asyncio.run(_serve(_Server(settings), listener, on_stop))


class RefuseWebPages:
    """No request that a web page made is served: whoever opens one must not be able to wipe or pause a run.

    Browsers mark such requests with Sec-Fetch-Site or Origin; our clients, curl and Atropos' send neither. A page that
    a person typed the address of comes with "none".
    """

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        headers = dict(scope.get("headers", ()))
        if b"origin" in headers or headers.get(b"sec-fetch-site", b"none") not in (b"none", b"same-origin"):
            await Response("requests of web pages are refused", 403)(scope, receive, send)
        else:
            await self._app(scope, receive, send)


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are ours: uvicorn would raise them again after its shutdown, and not end with 0."""
        yield


async def _serve(server: _Server, listener: socket.socket, on_stop: Callable[[], None]) -> None:
    def stop() -> None:
        on_stop()
        server.should_exit = True

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    await server.serve(sockets=[listener])
