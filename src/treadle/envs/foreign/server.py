"""Serving the recorder inside the environment's own event loop."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from typing import Any

from treadle.log import get_logger
from treadle.net.access import Access, AccessRules, Guard
from treadle.net.connections import Connections, HttpLimits
from treadle.net.listening import take_port
from treadle.net.server import SignalFreeServer, server_settings
from treadle.net.urls import url_to

TOKEN_VARIABLE = "TREADLE_RECORDER_TOKEN"  # noqa: S105 - the name of a variable
MAX_CONNECTIONS = 4000  # an agent may hold several
log = get_logger("env")


@contextlib.asynccontextmanager
async def serving(app: Any, host: str, port: int) -> AsyncIterator[str]:
    """Serve until the block is left; yields the URL. Port 0 takes a free one."""
    access = Access.of(AccessRules(process="recorder", host=host, token_variable=TOKEN_VARIABLE), os.environ)
    listener = take_port(host, port)
    limits = HttpLimits(max_connections=MAX_CONNECTIONS)
    connections = Connections(limits)
    settings = server_settings(Guard(app, access), connections, limits, lifespan="off")
    server = SignalFreeServer(settings)
    watch = asyncio.ensure_future(connections.watch())
    serve = asyncio.ensure_future(server.serve(sockets=[listener]))
    try:
        url = url_to(host, listener.getsockname()[1])
        log.info("recorder", url=url)
        yield url
    finally:
        server.should_exit = True
        await asyncio.gather(serve, return_exceptions=True)
        watch.cancel()
        listener.close()


def api_key() -> str:
    """What agents send as their key: the recorder's token, where it has one."""
    return os.environ.get(TOKEN_VARIABLE, "none")
