"""Build the hub's ASGI application and run it as a process until SIGTERM."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from treadle.background import awake_s
from treadle.config.schema import HubConfig
from treadle.faults import reach
from treadle.hub.atropos_routes import AtroposRoutes
from treadle.hub.endpoint import OBSERVER, Endpoint, Handler, access_of, http_error, raw_json
from treadle.hub.observer_routes import EventStream, ObserverRoutes
from treadle.hub.openapi import document
from treadle.hub.own_routes import OwnRoutes
from treadle.hub.state import Clock, HubState, explain
from treadle.log import get_logger
from treadle.net.access import Access, Guard
from treadle.net.address import take_port
from treadle.net.connections import HttpLimits
from treadle.net.server import serve_until_stopped
from treadle.store import StorageFailed, Store, set_aside
from treadle.watch.waits import Waits
from treadle.watch.watchdog import Watchdog

# ---- application

OnLoop = Callable[[asyncio.AbstractEventLoop], None]
Page = tuple[str, Handler]  # (path, what answers GET): served beside the interface, and no part of its description


def build_app(store: Store, config: HubConfig, clock: Clock = time.monotonic) -> Guard:
    """`build_app(Store.open(path), HubConfig())`. The caller closes the store in the end."""
    return app_of(HubState.build(store, config, clock), access_of(config, os.environ))


def app_of(hub: HubState, access: Access, pages: Sequence[Page] = (), on_loop: OnLoop = lambda _: None) -> Guard:
    """`on_loop` is called with the event loop, once it runs."""
    event_stream = EventStream(hub.store, hub.batch_signal)
    hub.metrics.after_event = hub.store.event_ends()[1]
    hub.store.commit_watchers.append(hub.metrics.commit)

    @contextlib.asynccontextmanager
    async def at_work(_: Starlette) -> AsyncIterator[None]:
        on_loop(asyncio.get_running_loop())
        await hub.validators.start()
        async with event_stream.open():
            yield
        await hub.validators.close()

    async def openapi(_: Request) -> Response:
        return raw_json(description)

    async def no_route(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)  # noqa: S101 - registered for no other
        hub.metrics.no_route(str(error.status_code))
        return await http_error(request, error)

    endpoints = [
        *AtroposRoutes(hub).endpoints(),
        *OwnRoutes(hub).endpoints(),
        *ObserverRoutes(hub, event_stream).endpoints(),
        Endpoint("GET", "/openapi.json", openapi, "this description", roles=OBSERVER, answer=dict),
    ]
    further = [Endpoint("GET", path, handler, "a page", roles=OBSERVER) for path, handler in pages]
    description = document(endpoints, needs_token=not access.is_open)
    app = Starlette(
        routes=[endpoint.route(hub.metrics.request) for endpoint in [*endpoints, *further]],
        exception_handlers={HTTPException: no_route},
        lifespan=at_work,
    )
    return Guard(app, access)


# ---- process

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
                disk_patience_s=config.patience_s,
                on_failure=_stop_soon,
            ) as store,
            Watchdog("hub", "hub", waits) as watchdog,
        ):
            hub = HubState.build(store, config, awake_s)
            _tell_what_was_there(store)
            log.info("listening", host=config.host, port=config.port, database=str(config.database))
            with pages(store, partial(explain, hub), hub.is_run_at_work) as shown:
                app = app_of(hub, access, shown, watchdog.watch_loop)
                serve_until_stopped(app, listener, on_stop=hub.batch_signal.close, limits=limits)
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
