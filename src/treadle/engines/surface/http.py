"""Routes whose errors become answers, and the bodies that they take."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from treadle.engines.surface.served import Ledger
from treadle.errors import RequestError, TreadleError, UserError
from treadle.wire.http_bodies import json_answer, read_json

MAX_BODY_BYTES = 16 << 20
OPENAI_PREFIX = "/v1/"
CLIENT_LEFT = 499

T = TypeVar("T")
Handler = Callable[[Request], Awaitable[Response]]


class NotHere(RequestError):
    """A path, a model or an adapter that does not exist."""


def route(path: str, handler: Handler, ledger: Ledger, *, method: str = "GET") -> Route:
    """A route whose errors become answers, and whose requests are counted."""

    async def guarded(http: Request) -> Response:
        started = time.monotonic()
        try:
            response = await handler(http)
        except TreadleError as error:
            response = refusal(path, status_of(error), str(error))
        except ClientDisconnect:
            response = nobody_reads()  # it left before all of its question was here
        ledger.count(path, response.status_code, time.monotonic() - started)
        return response

    return Route(path, guarded, methods=[method])


def status_of(error: TreadleError) -> int:
    """What was asked is wrong (400, 404), or it cannot be done now (503)."""
    if isinstance(error, NotHere):
        return 404
    return 400 if isinstance(error, RequestError | UserError) else 503


def refusal(path: str, status: int, message: str) -> Response:
    return json_answer(error_body(message, status) if path.startswith(OPENAI_PREFIX) else {"error": message}, status)


def error_body(message: str, status: int) -> dict[str, object]:
    """The shape in which OpenAI's clients read errors."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}


async def decode(http: Request, kind: type[T]) -> T:
    kind_of_body = http.headers.get("content-type", "application/json")
    if not kind_of_body.startswith("application/json"):
        raise RequestError(f"the body must be application/json, not {kind_of_body[:60]}")
    return await read_json(http, kind, max_bytes=MAX_BODY_BYTES)


def nobody_reads() -> Response:
    return Response(status_code=CLIENT_LEFT)


def folder_here(path: str) -> Path:
    """A folder on this machine that a request names."""
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise NotHere(f"there is no folder {path} on the engine's machine", fix="give a path that both sides see")
    return folder.resolve()
