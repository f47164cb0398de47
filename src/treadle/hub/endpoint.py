"""Endpoint: path, roles, body and answer types of one route, and how handlers' errors become HTTP responses.

Routes, request counters and the OpenAPI page are made from the endpoints.
"""

from __future__ import annotations

import asyncio
import gzip
import sqlite3
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, Literal
from uuid import uuid4

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from treadle.config.schema import HubConfig
from treadle.errors import DiskFull
from treadle.faults import reach
from treadle.hub.messages import Refused, word
from treadle.log import get_logger
from treadle.net import access
from treadle.net.access import Access, AccessRules, why_refused
from treadle.net.tokens import HUB_ADMIN_TOKEN_VARIABLE, HUB_TOKEN_VARIABLE, Role
from treadle.store import BatchPruned, HeldByAnother, KeyReused, QueueFull, StaleToken, StorageFailed

# ---- roles

# The roles that may use a route.
OBSERVER = access.EVERYBODY  # every token may read
ADMIN = access.ADMIN
ENVIRONMENT: frozenset[Role] = frozenset({"environment"})
TRAINER: frozenset[Role] = frozenset({"trainer"})
ENGINE: frozenset[Role] = frozenset({"engine"})
REPORTER = ENVIRONMENT | TRAINER | ENGINE


def access_of(config: HubConfig, env: Mapping[str, str]) -> Access:
    """`access_of(config, os.environ)`. Makes token files that are not there yet."""
    rules = AccessRules(
        process="hub",
        host=config.host,
        token_variable=HUB_TOKEN_VARIABLE,
        token_file=config.token_file,
        admin_token_variable=HUB_ADMIN_TOKEN_VARIABLE,
        admin_token_file=config.admin_token_file,
        allowed_hosts=config.allowed_hosts,
        open_to_all=frozenset({("GET", "/healthz")}),
    )
    return Access.of(rules, env)


# ---- responses

Handler = Callable[[Request], Awaitable[Response]]

MIN_COMPRESSED_BYTES = 1000
COMPRESS_LEVEL = 1  # token ids shrink to a third already; higher levels cost ten times the time
COMPRESS_ELSEWHERE_BYTES = 64 * 1024  # from here on it would hold up other requests: done in a thread
RETRY_AFTER_S = "2"
log = get_logger("hub")


def json_answer(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return raw_json(msgspec.json.encode(value), status, headers)


def raw_json(body: bytes, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(body, status, dict(headers or {}), media_type="application/json")


async def answer(handler: Handler, request: Request) -> tuple[Response, str]:
    """The response and, when it is a refusal, the word it is counted under.

    The one place where an error becomes an answer. What a client reads is always our own words.
    """
    reason = ""
    try:
        response = await handler(request)
    except Refused as refused:
        reason = refused.reason
        log.debug("refused", path=request.url.path, status=refused.status, detail=refused.detail)
        response = json_answer({"detail": refused.detail}, refused.status, refused.headers)
    except (StaleToken, HeldByAnother, KeyReused, BatchPruned) as refusal:
        reason = word(refusal)
        response = json_answer({"detail": str(refusal)}, 409)
    except (QueueFull, StorageFailed) as refusal:
        reason = word(refusal)
        response = json_answer({"detail": refusal.message}, 503, {"Retry-After": RETRY_AFTER_S})
    except DiskFull as refusal:
        reason = word(refusal)
        response = json_answer({"detail": refusal.message}, 507)
    except ClientDisconnect:
        return Response(status_code=400), "disconnected"  # nobody is there to read it
    except sqlite3.Error:
        reason = "read_failed"
        log.error("read_failed", exc_info=True, path=request.url.path)
        response = json_answer({"detail": "the queue cannot be read"}, 503, {"Retry-After": RETRY_AFTER_S})
    except Exception:
        incident = uuid4().hex[:12]  # ties the answer to the trace in the log, and tells nothing else
        reason = "internal_error"
        log.error("internal_error", exc_info=True, path=request.url.path, incident=incident)
        response = json_answer({"detail": "internal error", "incident": incident}, 500)
    reach("hub:before_reply")
    return await _compressed(request, response), reason


async def http_error(_: Request, error: Exception) -> Response:
    """Unknown paths and methods."""
    assert isinstance(error, HTTPException)  # noqa: S101 - registered for no other
    return json_answer({"detail": error.detail}, error.status_code, error.headers)


async def _compressed(request: Request, response: Response) -> Response:
    if isinstance(response, StreamingResponse) or len(response.body) < MIN_COMPRESSED_BYTES:
        return response
    response.headers["vary"] = "Accept-Encoding"
    if not _takes_gzip(request.headers.get("accept-encoding", "")):
        return response
    body = bytes(response.body)
    if len(body) >= COMPRESS_ELSEWHERE_BYTES:
        packed = await asyncio.to_thread(gzip.compress, body, COMPRESS_LEVEL)
    else:
        packed = gzip.compress(body, COMPRESS_LEVEL)
    response.body = packed
    response.headers["content-length"] = str(len(packed))
    response.headers["content-encoding"] = "gzip"
    return response


def _takes_gzip(accepted: str) -> bool:
    """`gzip`, also in a list and with a weight, but not with the weight 0: that means "anything but"."""
    offers = (offer.replace(" ", "").lower().split(";q=") for offer in accepted.split(","))
    return any("gzip" in offer[0] and offer[-1].strip("0.") != "" for offer in offers)


# ---- routes

JSON = "application/json"
TEXT = "text/plain"
Watch = Callable[["Endpoint", int, str, float], None]  # (endpoint, status, reason of a refusal, seconds)


@dataclass(frozen=True, slots=True)
class Parameter:
    """`schema` is JSON Schema of the value as it is written: a step in a path is an integer."""

    name: str
    place: Literal["path", "query", "header"]
    summary: str
    schema: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Link:
    """How an answer leads to the next call: `parameters` and `body` are OpenAPI's runtime expressions."""

    method: Literal["GET", "POST"]
    path: str
    summary: str
    parameters: Mapping[str, str] = field(default_factory=dict)
    body: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """`body` and `answer` are types of JSON; None: the bytes are described by their media type alone.

    `refusals` are the statuses beside those that every route, or every route with a body, can answer. `roles` are those
    whose token opens the route.
    """

    method: Literal["GET", "POST"]
    path: str
    handler: Handler
    summary: str
    roles: Set[Role] = field(kw_only=True)
    body: Any = None
    body_type: str = JSON
    body_required: bool = True
    example: Any = None  # a body, as JSON
    parameters: Sequence[Parameter] = ()
    answer: Any = None
    media_type: str = JSON
    further_types: Sequence[str] = ()  # what else the 200 may be, when the client asks for it
    refusals: Sequence[int] = ()
    links: Mapping[str, Link] = field(default_factory=dict)

    @property
    def takes_body(self) -> bool:
        return self.body is not None or self.body_type != JSON

    def route(self, watch: Watch) -> Route:
        """GET only means GET: HEAD, which comes with it elsewhere, would take a batch and throw it away."""

        async def handle(request: Request) -> Response:
            began = time.perf_counter()
            response, reason = await answer(self._handle, request)
            watch(self, response.status_code, reason, time.perf_counter() - began)
            return response

        route = Route(self.path, handle, methods=[self.method])
        route.methods = {self.method}
        return route

    async def _handle(self, request: Request) -> Response:
        why = why_refused(request.scope, self.roles)
        if why is not None:
            raise Refused(403, why, reason="not_allowed")
        return await self.handler(request)
