"""Take a listening port, or one that the launcher or systemd hands over, and serve an ASGI app on it until SIGTERM."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import math
import os
import signal
import socket
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import uvicorn
import uvloop

from treadle.errors import ConfigError, PortInUse
from treadle.net.connections import Connections, HttpLimits
from treadle.net.http_protocol import protocol_of
from treadle.net.urls import is_loopback_host

# Our launcher names the descriptor of the socket that it holds for a child.
HANDED_FD = "TREADLE_LISTEN_FD"
_FIRST_FD_OF_SYSTEMD = 3


def take_port(host: str, port: int) -> socket.socket:
    """A listening socket, taken before anything slow is done: a second process ends having touched nothing.

    The launcher may hand one over, or a service manager (LISTEN_FDS, as systemd does). There it stays open while this
    process restarts: clients which give up quickly, as Atropos' environments do, wait in line and notice nothing.
    """
    handed = os.environ.pop(HANDED_FD, None)
    if handed is not None:
        os.set_inheritable(int(handed), False)  # our children listen elsewhere
        return socket.socket(fileno=int(handed))
    if os.environ.get("LISTEN_PID") == str(os.getpid()) and os.environ.get("LISTEN_FDS") == "1":
        listener = socket.socket(fileno=_FIRST_FD_OF_SYSTEMD)
        _refuse_wider(listener, host)
        return listener
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


def _refuse_wider(listener: socket.socket, host: str) -> None:
    """Refuse a socket that other machines can reach when `host` is loopback: no token was required then."""
    if listener.family not in (socket.AF_INET, socket.AF_INET6) or not is_loopback_host(host):
        return
    address = listener.getsockname()[0]
    if not is_loopback_host(address):
        raise ConfigError(
            f"the socket that was handed over listens on {address}, and --host says {host}",
            fix=f"add --host {address} and --token-file FILE, or let the service manager listen on {host}",
        )


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
        app,
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
