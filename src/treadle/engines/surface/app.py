"""The surface as an ASGI application: the same routes whichever engine stands behind it."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from treadle.config import EngineConfig
from treadle.config.engine_choice import adapter_root
from treadle.engines.port import Engine
from treadle.engines.surface.adapters import AdapterRoutes
from treadle.engines.surface.bridge import BridgeRoutes
from treadle.engines.surface.generate import generate_routes
from treadle.engines.surface.http import refusal, route
from treadle.engines.surface.metrics import metrics_route
from treadle.engines.surface.openai_routes import openai_routes
from treadle.engines.surface.served import Served
from treadle.net.access import Access, AccessRules, Guard
from treadle.net.bodies import json_answer
from treadle.wire.bridge import TOKEN_VARIABLE


def build_app(engine: Engine, config: EngineConfig, env: Mapping[str, str]) -> Guard:
    """`build_app(engine, config, os.environ)`. The caller closes the engine in the end."""
    return app_of(engine, config, access_of(config, env))


def access_of(config: EngineConfig, env: Mapping[str, str]) -> Access:
    """Who may call; refuses an address that others can reach when there is no token."""
    rules = AccessRules(
        process="engine",
        host=config.host,
        token_variable=TOKEN_VARIABLE,
        token_file=config.token_file,
        allowed_hosts=config.allowed_hosts,
        open_to_all=frozenset({("GET", "/health")}),
    )
    return Access.of(rules, env)


@contextlib.asynccontextmanager
async def _no_life() -> AsyncIterator[None]:
    """Of an application whose engine is somebody else's."""
    yield


def app_of(
    engine: Engine,
    config: EngineConfig,
    access: Access,
    *,
    life: Callable[[], AbstractAsyncContextManager[None]] = _no_life,
    bridge_file: Path | None = None,
) -> Guard:
    """`life` is entered when the application begins to serve, and left when it ends; `bridge_file` is there between."""

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        async with life():
            await served.write_bridge_file()
            try:
                yield
            finally:
                served.remove_bridge_file()
                served.templates.close()

    served = Served(
        engine=engine,
        model_name=config.served_model_name or config.model,
        pause_timeout_s=config.pause_timeout_s,
        adapter_root=adapter_root(config),
        model_folder=engine.facts.folder.resolve(),
        bridge_file=bridge_file,
    )

    async def list_endpoints(_: HttpRequest) -> Response:
        found = [{"path": r.path, "methods": sorted((r.methods or set()) - {"HEAD"})} for r in routes]
        return json_answer({"endpoints": found})

    async def no_route(http: HttpRequest, error: Exception) -> Response:
        assert isinstance(error, HTTPException)  # noqa: S101 - registered for no other
        return refusal(http.url.path, error.status_code, f"{http.method} {http.url.path}: {error.detail}")

    routes: list[Route] = [
        *generate_routes(served),
        *openai_routes(served),
        *BridgeRoutes(served).routes(),
        *AdapterRoutes(served).routes(),
        metrics_route(served),
        route("/bridge/list_endpoints", list_endpoints, served.ledger),
    ]
    return Guard(Starlette(routes=routes, exception_handlers={HTTPException: no_route}, lifespan=lifespan), access)
