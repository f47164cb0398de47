"""Build the ASGI application: the same routes for every engine, and GET /metrics for Prometheus."""

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
from treadle.engines.api.adapters import AdapterRoutes
from treadle.engines.api.bridge import BridgeRoutes
from treadle.engines.api.context import Ledger, Served
from treadle.engines.api.generate import generate_routes
from treadle.engines.api.http import refusal, route
from treadle.engines.api.openai import openai_routes
from treadle.engines.interface import Engine, EngineState
from treadle.net.access import Access, AccessRules, Guard
from treadle.net.bodies import json_answer
from treadle.net.exposition import CONTENT_TYPE, Page
from treadle.wire.bridge import TOKEN_VARIABLE


def metrics_route(served: Served) -> Route:
    async def metrics(_: HttpRequest) -> Response:
        page = Page()
        _add_state(page, await served.engine.state(), len(served.engine.adapters()))
        _add_requests(page, served.ledger)
        return Response(page.text(), media_type=CONTENT_TYPE)

    return route("/metrics", metrics, served.ledger)


def _add_state(page: Page, state: EngineState, num_adapters: int) -> None:
    page.family("engine_up", "gauge", "1 while it can generate").add(int(state.failure is None))
    page.family("engine_held", "gauge", "1 while no token is sampled because weights change").add(int(state.is_held))
    page.family("engine_policy_version", "gauge", "the policy version that is served").add(state.policy_version)
    page.family("engine_requests_running", "gauge", "requests that are being generated").add(state.num_running)
    page.family("engine_requests_waiting", "gauge", "requests that wait for room").add(state.num_waiting)
    page.family("engine_adapters", "gauge", "LoRA adapters that are loaded").add(num_adapters)
    page.family("engine_generated_tokens_total", "counter", "tokens that were sampled").add(state.generated_tokens)
    page.family("engine_generating_seconds_total", "counter", "time spent generating").add(state.generating_s)


def _add_requests(page: Page, ledger: Ledger) -> None:
    answered = page.family("engine_http_requests_total", "counter", "calls that were answered, by route and status")
    for (path, status), count in sorted(ledger.requests.items()):
        answered.add(count, {"route": path, "status": str(status)})
    seconds = page.family("engine_http_request_seconds", "histogram", "time until a call was answered, by route")
    for path, histogram in sorted(ledger.seconds.items()):
        seconds.add_histogram(histogram, {"route": path})


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
