"""The hub as a process: take the port, open the queue, serve until told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import time
from collections.abc import Iterator

import uvicorn

from treadle.config.schema import HubConfig
from treadle.hub.app import app_of
from treadle.hub.state import HubState
from treadle.log import get_logger
from treadle.store import Store
from treadle.wire.ports import take_port

SHUTDOWN_S = 1  # waiting calls are answered at once, so this is only for clients that do not read
log = get_logger("hub")


def serve(config: HubConfig) -> None:
    """Run until SIGTERM or SIGINT; then answer what waits, flush and return."""
    listener = take_port(config.host, config.port)
    try:
        with Store.open(config.database) as store:
            asyncio.run(_serve(config, store, listener))
    finally:
        listener.close()
    log.info("stopped")


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are ours: uvicorn would raise them again after its shutdown, and not end with 0."""
        yield


async def _serve(config: HubConfig, store: Store, listener: socket.socket) -> None:
    hub = HubState.build(store, config, time.monotonic)
    server = _Server(
        uvicorn.Config(
            app_of(hub),
            log_level="warning",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=SHUTDOWN_S,
        )
    )

    def stop() -> None:
        hub.bell.close()
        server.should_exit = True

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    log.info("listening", host=config.host, port=config.port, database=str(config.database))
    await server.serve(sockets=[listener])
