"""The hub as a process: take the port, open the queue, serve until told to stop."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Sequence
from functools import partial

from treadle.clock import awake_s
from treadle.config.schema import HubConfig
from treadle.faults import reach
from treadle.hub.app import Page, app_of
from treadle.hub.explain import explain
from treadle.hub.guard import access_of
from treadle.hub.state import HubState
from treadle.log import get_logger
from treadle.store import StorageFailed, Store, set_aside
from treadle.watch.waits import Waits
from treadle.watch.watchdog import Watchdog
from treadle.wire.http_limits import HttpLimits
from treadle.wire.listening import take_port
from treadle.wire.serving import serve_until_stopped

# Given the queue, who explains it and who says whether anybody is at work, pages that are served beside the interface.
Pages = Callable[[Store, Callable[[], str], Callable[[], bool]], contextlib.AbstractContextManager[Sequence[Page]]]
FAILURE_SHOWN_S = 5.0  # a hub whose store failed answers this long why, then ends
LARGE_BODIES = 4  # of the largest size that may be worked on at once: there are at most as many processes to check them
log = get_logger("hub")


def no_pages(*_: object) -> contextlib.AbstractContextManager[Sequence[Page]]:
    return contextlib.nullcontext(())


def serve(config: HubConfig, pages: Pages = no_pages) -> None:
    """Run until SIGTERM or SIGINT; then answer what waits, flush and return."""
    access = access_of(config, os.environ)
    listener = take_port(config.host, config.port)
    limits = HttpLimits(
        max_connections=config.max_connections,
        read_timeout_s=config.read_timeout_s,
        max_body_bytes_in_flight=LARGE_BODIES * config.max_body_bytes,
    )
    try:
        if config.fresh:
            set_aside(config.database)
        waits = Waits()
        with (
            Store.open(
                config.database,
                clock=awake_s,
                waits=waits,
                disk_patience_s=config.disk_patience_s,
                on_failure=_stop_soon,
            ) as store,
            Watchdog("hub", "hub", waits) as watchdog,
        ):
            hub = HubState.build(store, config, awake_s)
            _tell_what_was_there(store)
            log.info("listening", host=config.host, port=config.port, database=str(config.database))
            with pages(store, partial(explain, hub), hub.is_run_at_work) as shown:
                app = app_of(hub, access, shown, watchdog.watch_loop)
                serve_until_stopped(app, listener, on_stop=hub.bell.close, limits=limits)
            reach("hub:stopping")
        if store.failure:
            raise StorageFailed(store.failure)
    finally:
        listener.close()
    log.info("stopped")


def _stop_soon() -> None:
    timer = threading.Timer(FAILURE_SHOWN_S, os.kill, (os.getpid(), signal.SIGTERM))
    timer.daemon = True
    timer.start()


def _tell_what_was_there(store: Store) -> None:
    """Whoever starts a new run on an old file should know it."""
    counts, run = store.counts(), store.run_state()
    if counts.accepted_groups:
        log.info(
            "continuing",
            step=run.current_step,
            groups_waiting=counts.queued.groups,
            groups_trained=counts.trained.groups,
            hint="--fresh begins with an empty queue",
        )
