"""The hub as an ASGI application: the endpoints over one shared state, and nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Callable, Sequence

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from treadle.config.schema import HubConfig
from treadle.hub.answers import Handler, http_error, raw_json
from treadle.hub.atropos_routes import AtroposRoutes
from treadle.hub.events import Newsroom
from treadle.hub.guard import OBSERVER, access_of
from treadle.hub.observer_routes import ObserverRoutes
from treadle.hub.openapi import document
from treadle.hub.own_routes import OwnRoutes
from treadle.hub.routing import Endpoint
from treadle.hub.state import Clock, HubState
from treadle.store import Store
from treadle.wire.guard import Access, Guard

OnLoop = Callable[[asyncio.AbstractEventLoop], None]
Page = tuple[str, Handler]  # (path, what answers GET): served beside the interface, and no part of its description


def build_app(store: Store, config: HubConfig, clock: Clock = time.monotonic) -> Guard:
    """`build_app(Store.open(path), HubConfig())`. The caller closes the store in the end."""
    return app_of(HubState.build(store, config, clock), access_of(config, os.environ))


def app_of(hub: HubState, access: Access, pages: Sequence[Page] = (), on_loop: OnLoop = lambda _: None) -> Guard:
    """`on_loop` is called with the event loop, once it runs."""
    newsroom = Newsroom(hub.store, hub.bell)
    hub.metrics.after_event = hub.store.event_ends()[1]
    hub.store.commit_watchers.append(hub.metrics.commit)

    @contextlib.asynccontextmanager
    async def at_work(_: Starlette) -> AsyncIterator[None]:
        on_loop(asyncio.get_running_loop())
        await hub.porters.start()
        async with newsroom.open():
            yield
        await hub.porters.close()

    async def openapi(_: Request) -> Response:
        return raw_json(description)

    async def no_route(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)  # noqa: S101 - registered for no other
        hub.metrics.no_route(str(error.status_code))
        return await http_error(request, error)

    endpoints = [
        *AtroposRoutes(hub).endpoints(),
        *OwnRoutes(hub).endpoints(),
        *ObserverRoutes(hub, newsroom).endpoints(),
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
