"""Between HTTP and our own values: bodies in, answers and errors out, and clients that leave."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from treadle.engines.surface.served import Ledger
from treadle.errors import RequestError, TreadleError, UserError

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


def json_answer(value: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


async def decode(http: Request, kind: type[T]) -> T:
    kind_of_body = http.headers.get("content-type", "application/json")
    if not kind_of_body.startswith("application/json"):
        raise RequestError(f"the body must be application/json, not {kind_of_body[:60]}")
    raw = bytearray()
    async for chunk in http.stream():
        raw += chunk
        if len(raw) > MAX_BODY_BYTES:
            raise RequestError(f"the body is larger than {MAX_BODY_BYTES >> 20} MiB")
    try:
        return msgspec.json.decode(raw or b"{}", type=kind)
    except (msgspec.ValidationError, msgspec.DecodeError) as error:
        raise RequestError(str(error)) from None


async def unless_gone(http: Request, work: Coroutine[Any, Any, T]) -> T | None:
    """What `work` returns; it is cancelled when the client leaves before. None: nobody reads the answer."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(http.receive())  # after the body, the next message is the end of the connection
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        return await working if working.done() else None
    finally:
        for task in (working, leaving):
            if not task.done():
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task


def nobody_reads() -> Response:
    return Response(status_code=CLIENT_LEFT)


def folder_here(path: str) -> Path:
    """A folder on this machine that a request names."""
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise NotHere(f"there is no folder {path} on the engine's machine", fix="give a path that both sides see")
    return folder.resolve()
