"""The hub as an ASGI application: the routes over one shared state, and nothing else."""

from __future__ import annotations

import time

from starlette.applications import Starlette
from starlette.exceptions import HTTPException

from treadle.config.schema import HubConfig
from treadle.hub.answers import http_error
from treadle.hub.atropos_routes import AtroposRoutes
from treadle.hub.own_routes import OwnRoutes
from treadle.hub.state import Clock, HubState
from treadle.store import Store


def build_app(store: Store, config: HubConfig, clock: Clock = time.monotonic) -> Starlette:
    """`build_app(Store.open(path), HubConfig())`. The caller closes the store in the end."""
    return app_of(HubState.build(store, config, clock))


def app_of(hub: HubState) -> Starlette:
    return Starlette(
        routes=[*AtroposRoutes(hub).routes(), *OwnRoutes(hub).routes()],
        exception_handlers={HTTPException: http_error},
    )
