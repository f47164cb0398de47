"""Serving HTTP: one way to take a port, and one way to serve on it until told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import signal
import socket
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn

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


def serve_until_stopped(app: Any, listener: socket.socket, on_stop: Callable[[], None]) -> None:
    """Serve until SIGTERM or SIGINT. `on_stop` must end what waits, so that every client still gets an answer."""
    settings = uvicorn.Config(
        app,
        log_level="warning",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=1,  # for clients that do not read their answer
    )
    asyncio.run(_serve(_Server(settings), listener, on_stop))


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
