"""An endpoint: its path, what it takes, what it answers. Routes, counters and the OpenAPI page are made from it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, Literal

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from treadle.hub.answers import Handler, answer
from treadle.hub.refusals import Refused
from treadle.wire.guard import why_refused
from treadle.wire.tokens import Role

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
