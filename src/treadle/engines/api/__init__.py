"""Build the ASGI application: the same routes for every engine, and GET /metrics for Prometheus."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from treadle.config import EngineConfig
from treadle.config.schema import adapter_root
from treadle.engines.api.context import ApiContext, RequestStats, error_response, route
from treadle.engines.api.generate import generate_routes
from treadle.engines.api.openai import openai_routes
from treadle.engines.api.weights import AdapterRoutes, BridgeRoutes
from treadle.engines.interface import InferenceEngine, ServingStatus
from treadle.net.access import Access, AccessMiddleware, AccessRules
from treadle.net.prometheus_text import CONTENT_TYPE, Page
from treadle.net.server import json_answer
from treadle.wire.bridge import TOKEN_VARIABLE


def _metrics_page(state: ServingStatus, num_adapters: int, stats: RequestStats) -> str:
    page = Page()
    page.family("engine_up", "gauge", "1 if the engine can generate").add(int(state.failure is None))
    page.family("engine_held", "gauge", "1 while the engine is held for a weight update").add(int(state.is_held))
    page.family("engine_policy_version", "gauge", "served policy version").add(state.policy_version)
    page.family("engine_requests_running", "gauge", "running requests").add(state.num_running)
    page.family("engine_requests_waiting", "gauge", "queued requests").add(state.num_waiting)
    page.family("engine_adapters", "gauge", "loaded LoRA adapters").add(num_adapters)
    page.family("engine_generated_tokens_total", "counter", "sampled tokens").add(state.generated_tokens)
    page.family("engine_generating_seconds_total", "counter", "time spent generating").add(state.generating_s)
    answered = page.family("engine_http_requests_total", "counter", "HTTP requests by route and status")
    for (path, status), count in sorted(stats.requests.items()):
        answered.add(count, {"route": path, "status": str(status)})
    seconds = page.family("engine_http_request_seconds", "histogram", "HTTP request latency by route")
    for path, histogram in sorted(stats.seconds.items()):
        seconds.add_histogram(histogram, {"route": path})
    return page.text()


def engine_access(config: EngineConfig, env: Mapping[str, str]) -> Access:
    """Access rules; refuses an address that other machines can reach if there is no token."""
    rules = AccessRules(
        process="engine",
        host=config.host,
        token_variable=TOKEN_VARIABLE,
        token_file=config.token_file,
        allowed_hosts=config.allowed_hosts,
        open_to_all=frozenset({("GET", "/health")}),
    )
    return Access.of(rules, env)


def create_app(
    engine: InferenceEngine,
    config: EngineConfig,
    access: Access,
    *,
    lifespan: Callable[[], AbstractAsyncContextManager[None]] = contextlib.nullcontext,
    bridge_file: Path | None = None,
    engine_id: str | None = None,
) -> AccessMiddleware:
    """`lifespan` surrounds the time in which the application serves; `bridge_file` exists during that time;
    `engine_id`: None makes one."""

    @contextlib.asynccontextmanager
    async def app_lifespan(_: Starlette) -> AsyncIterator[None]:
        async with lifespan():
            await context.write_bridge_file()
            try:
                yield
            finally:
                context.remove_bridge_file()
                context.received.close()
                context.templates.close()

    context = ApiContext(
        engine=engine,
        model_name=config.served_model_name or config.model,
        adapter_root=adapter_root(config),
        model_folder=engine.facts.folder.resolve(),
        bridge_file=bridge_file,
        engine_id=engine_id or secrets.token_hex(8),
    )

    async def metrics(_: HttpRequest) -> Response:
        text = _metrics_page(await engine.status(), len(engine.adapters()), context.stats)
        return Response(text, media_type=CONTENT_TYPE)

    async def list_endpoints(_: HttpRequest) -> Response:
        found = [{"path": r.path, "methods": sorted((r.methods or set()) - {"HEAD"})} for r in routes]
        return json_answer({"endpoints": found})

    async def no_route(http: HttpRequest, error: Exception) -> Response:
        assert isinstance(error, HTTPException)  # noqa: S101 - registered for no other
        return error_response(http.url.path, error.status_code, f"{http.method} {http.url.path}: {error.detail}")

    routes: list[Route] = [
        *generate_routes(context),
        *openai_routes(context),
        *BridgeRoutes(context).routes(),
        *AdapterRoutes(context).routes(),
        route("/metrics", metrics, context.stats),
        route("/bridge/list_endpoints", list_endpoints, context.stats),
    ]
    return AccessMiddleware(
        Starlette(routes=routes, exception_handlers={HTTPException: no_route}, lifespan=app_lifespan), access
    )
