"""Serve an ASGI app until SIGTERM: uvicorn with limits, every client gets an answer before the end."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import math
import signal
import socket
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn
import uvloop

from treadle.net.connections import Connections, HttpLimits
from treadle.net.http_protocol import protocol_of

DEFAULT_LIMITS = HttpLimits()


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
