"""The hub as a process: take the port, open the queue, serve until told to stop."""

from __future__ import annotations

import time

from treadle.config.schema import HubConfig
from treadle.hub.app import app_of
from treadle.hub.state import HubState
from treadle.log import get_logger
from treadle.store import Store
from treadle.wire.serving import serve_until_stopped, take_port

log = get_logger("hub")


def serve(config: HubConfig) -> None:
    """Run until SIGTERM or SIGINT; then answer what waits, flush and return."""
    listener = take_port(config.host, config.port)
    try:
        with Store.open(config.database) as store:
            hub = HubState.build(store, config, time.monotonic)
            log.info("listening", host=config.host, port=config.port, database=str(config.database))
            serve_until_stopped(app_of(hub), listener, on_stop=hub.bell.close)
    finally:
        listener.close()
    log.info("stopped")
