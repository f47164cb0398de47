"""Build the hub's ASGI application with its OpenAPI description, and run it as a process until SIGTERM.

GET /openapi.json is made from the endpoints, so it describes what the routes do.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from treadle.background import awake_s
from treadle.config.schema import HubConfig
from treadle.faults import reach
from treadle.hub.atropos_routes import AtroposRoutes
from treadle.hub.endpoint import (
    JSON,
    OBSERVER,
    RETRY_AFTER_S,
    Endpoint,
    Handler,
    Link,
    access_of,
    json_answer,
    raw_json,
)
from treadle.hub.messages import LONG_TEXTS, MAX_DIGITS, MAX_NAME_CHARS, MAX_TEXT_CHARS
from treadle.hub.observer_routes import EventStream, ObserverRoutes
from treadle.hub.other_hubs import other_hubs
from treadle.hub.own_routes import OwnRoutes
from treadle.hub.state import HubState, explain
from treadle.log import get_logger
from treadle.net.access import Access, AccessMiddleware
from treadle.net.address import take_port
from treadle.net.connections import HttpLimits
from treadle.net.server import serve_until_stopped
from treadle.store import StorageFailed, Store, groups, runs
from treadle.store.choice import open_store, shown_queue
from treadle.watch.waits import Waits
from treadle.watch.watchdog import Watchdog
from treadle.wire.hub import Refusal

# ---- OpenAPI description

Json = dict[str, Any]
_REF = "#/components/schemas/{name}"

# What any request may be answered, before its route is asked.
OF_EVERY_ROUTE = (400, 403, 408, 431, 503)
OF_A_BODY = (413, 422)
REFUSALS = {
    400: "not HTTP as we speak it, no Host header, or a body that is no gzip",
    401: "no token, or not the hub's",
    403: "from a web page, under a name that is not this machine's, or with a token of another role",
    404: "there is no such thing",
    408: "the request came too slowly",
    409: "somebody else has it, or has had it: a lease that is over, an idempotency key of another body",
    413: "the body is too large",
    415: "the body has another Content-Type than this route takes",
    422: "a value is not acceptable: the detail names the field",
    431: "the headers are too large",
    503: "not now: the queue is full or cannot be written, or too many connections or bodies are open",
    507: "the disk is full; nothing that was accepted is lost",
}
DESCRIPTION = """\
The rollout hub: environments post scored groups, a trainer takes them in batches. The routes without /v1 are Atropos';
its environments and trainers work unchanged.

Bodies may be compressed (Content-Encoding: gzip). Numbers may be sent as strings ("1") and true as 1, as Atropos'
server takes them; unknown fields are ignored. A path that is not here is answered 404, another method than those named
405. Clients that know no tokens are given a URL with the token in it: http://HOST:PORT/t/TOKEN."""


def document(endpoints: Sequence[Endpoint], *, needs_token: bool) -> bytes:
    """OpenAPI 3.1 as JSON."""
    bodies = _types(endpoint.body for endpoint in endpoints)
    types = _types([*bodies, *(endpoint.answer for endpoint in endpoints), Refusal])
    schemas, components = msgspec.json.schema_components(types, ref_template=_REF)
    schema_of = dict(zip(map(repr, types), schemas, strict=True))
    for body in bodies:
        if isinstance(body, type) and issubclass(body, msgspec.Struct):
            _limit(components.get(body.__name__, {}))
    paths: dict[str, Json] = {}
    for endpoint in endpoints:
        paths.setdefault(endpoint.path, {})[endpoint.method.lower()] = _operation(endpoint, schema_of, needs_token)
    refusal = {"content": {JSON: {"schema": schema_of[repr(Refusal)]}}}
    refusals: Json = {str(status): {"description": text, **refusal} for status, text in REFUSALS.items()}
    retry_after = {"description": "seconds", "schema": {"type": "integer", "examples": [int(RETRY_AFTER_S)]}}
    refusals["503"]["headers"] = {"Retry-After": retry_after}
    described = {
        "openapi": "3.1.0",
        "info": {"title": "Treadle hub", "version": version("treadle"), "description": DESCRIPTION},
        "servers": [
            {"url": "/"},
            {
                "url": "/t/{token}",
                "description": "for clients that cannot send headers of their own",
                "variables": {"token": {"default": "TOKEN", "description": "the hub's token"}},
            },
        ],
        "paths": paths,
        "components": {
            "schemas": components,
            "responses": refusals,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer", "description": "the hub's token"}},
        },
    }
    return json.dumps(described, separators=(",", ":")).encode()  # msgspec encodes no integer of 128 bits


def _types(types: Iterable[Any]) -> list[Any]:
    """Distinct types, compared by name: list[ScoredGroup] is another object each time it is written."""
    return list({repr(one): one for one in types if one is not None}.values())


def _operation(endpoint: Endpoint, schema_of: Mapping[str, Json], needs_token: bool) -> Json:
    is_open = endpoint.path == "/healthz"
    security: list[Json] = [{"token": []}] if needs_token else [{}, {"token": []}]
    operation: Json = {
        "operationId": _operation_id(endpoint.method, endpoint.path),
        "summary": endpoint.summary,
        "responses": _responses(endpoint, schema_of, needs_token=needs_token and not is_open),
        "security": [] if is_open else security,
    }
    if endpoint.parameters:
        operation["parameters"] = [
            {
                "name": parameter.name,
                "in": parameter.place,
                "description": parameter.summary,
                "required": parameter.place == "path",
                "schema": dict(parameter.schema),
            }
            for parameter in endpoint.parameters
        ]
    if endpoint.takes_body:
        schema = schema_of[repr(endpoint.body)] if endpoint.body is not None else _raw(endpoint.body_type)
        content: Json = {endpoint.body_type: {"schema": schema}}
        if endpoint.example is not None:
            content[endpoint.body_type]["example"] = endpoint.example
        operation["requestBody"] = {"content": content, "required": endpoint.body_required}
    return operation


def _operation_id(method: str, path: str) -> str:
    words = path.replace("{", "").replace("}", "").replace("-", "_").strip("/").split("/")
    return "_".join([method.lower(), *words]).rstrip("_")


def _responses(endpoint: Endpoint, schema_of: Mapping[str, Json], *, needs_token: bool) -> Json:
    schema = schema_of[repr(endpoint.answer)] if endpoint.answer is not None else _raw(endpoint.media_type)
    content = {endpoint.media_type: {"schema": schema}}
    content |= {media_type: {"schema": _raw(media_type)} for media_type in endpoint.further_types}
    done: Json = {"description": endpoint.summary, "content": content}
    if endpoint.links:
        done["links"] = {name: _link(link) for name, link in endpoint.links.items()}
    statuses = {*OF_EVERY_ROUTE, *endpoint.refusals}
    if endpoint.takes_body:
        statuses.update(OF_A_BODY)
    if needs_token:
        statuses.add(401)
    return {"200": done, **{str(status): {"$ref": f"#/components/responses/{status}"} for status in sorted(statuses)}}


def _link(link: Link) -> Json:
    described: Json = {"operationId": _operation_id(link.method, link.path), "description": link.summary}
    if link.parameters:
        described["parameters"] = dict(link.parameters)
    if link.body:
        described["requestBody"] = dict(link.body)
    return described


def _raw(media_type: str) -> Json:
    return {"type": "string"} if media_type.startswith("text/") else {}


def _limit(component: Json) -> None:
    """What messages.check_values refuses, said in JSON Schema."""
    for name, schema in component.get("properties", {}).items():
        for one in [schema, *schema.get("anyOf", ())]:
            if one.get("type") == "integer":
                one.setdefault("minimum", 1 - 10**MAX_DIGITS)
                one.setdefault("maximum", 10**MAX_DIGITS - 1)
            elif one.get("type") == "string":
                one.setdefault("maxLength", MAX_TEXT_CHARS if name in LONG_TEXTS else MAX_NAME_CHARS)
                one.setdefault("pattern", r"^[^\u0000]*$")


# ---- application

OnLoop = Callable[[asyncio.AbstractEventLoop], None]
Page = tuple[str, Handler]  # (path, what answers GET): served beside the interface, and no part of its description


def app_of(
    hub: HubState, access: Access, pages: Sequence[Page] = (), on_loop: OnLoop = lambda _: None
) -> AccessMiddleware:
    """`on_loop` is called with the event loop, once it runs."""
    event_stream = EventStream(hub.store, hub.batch_signal)
    hub.metrics.after_event = hub.store.read(runs.event_ends)[1]
    hub.store.commit_watchers.append(hub.metrics.commit)

    @contextlib.asynccontextmanager
    async def at_work(_: Starlette) -> AsyncIterator[None]:
        on_loop(asyncio.get_running_loop())
        await hub.validators.start()
        async with event_stream.open(), other_hubs(hub):
            yield
        await hub.validators.close()

    async def openapi(_: Request) -> Response:
        return raw_json(description)

    async def no_route(_: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)  # noqa: S101 - registered for no other
        hub.metrics.no_route(str(error.status_code))
        return json_answer({"detail": error.detail}, error.status_code, error.headers)

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
    return AccessMiddleware(app, access)


# ---- process

# Given the queue, who explains it and who says whether anybody is at work, pages that are served beside the interface.
Pages = Callable[[Store, Callable[[], str], Callable[[], bool]], contextlib.AbstractContextManager[Sequence[Page]]]
FAILURE_SHOWN_S = 5.0  # a hub whose store failed answers this long why, then ends
LARGE_BODIES = 4  # of the largest size that may be worked on at once: there are at most as many processes to check them
log = get_logger("hub")


def serve(config: HubConfig, pages: Pages = lambda *_: contextlib.nullcontext(())) -> None:
    """Run until SIGTERM or SIGINT; then answer what waits, flush and return."""
    access = access_of(config, os.environ)
    listener = take_port(config.host, config.port)
    limits = HttpLimits(
        read_timeout_s=config.read_timeout_s,
        max_body_bytes_in_flight=LARGE_BODIES * config.max_body_bytes,
    )
    try:
        waits = Waits()
        with (
            open_store(config, waits, _stop_soon) as store,
            Watchdog("hub", "hub", waits) as watchdog,
        ):
            hub = HubState.build(store, config, awake_s)
            _tell_what_was_there(store)
            log.info("listening", host=config.host, port=config.port, queue=shown_queue(config))
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
    counts, run = store.read(groups.counts), store.read(runs.read_run)
    if counts.accepted_groups:
        log.info(
            "continuing",
            step=run.current_step,
            groups_waiting=counts.queued.groups,
            groups_trained=counts.trained.groups,
            hint="--fresh begins with an empty queue",
        )
