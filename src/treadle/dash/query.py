"""What a request asks for, checked; what cannot be meant is answered with a plain sentence."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable

import msgspec
from starlette.requests import Request
from starlette.responses import Response

Handler = Callable[[Request], Awaitable[Response]]
MAX_DIGITS = 15


class Unanswerable(Exception):
    """`Unanswerable(404, "there is no group 12")`"""

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail


def telling(handler: Handler) -> Handler:
    """The handler, with its complaints as answers."""

    async def handle(request: Request) -> Response:
        try:
            return await handler(request)
        except Unanswerable as problem:
            return as_json({"detail": problem.detail}, problem.status)

    return handle


def as_json(value: object, status: int = 200) -> Response:
    body = msgspec.json.encode(value)
    headers = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
    return Response(body, status, headers, media_type="application/json")


def whole(request: Request, name: str) -> int | None:
    text = request.query_params.get(name, "").strip()
    if not text:
        return None
    digits = text.removeprefix("-")
    if not digits.isascii() or not digits.isdecimal() or len(digits) > MAX_DIGITS:
        raise Unanswerable(422, f"{name} must be a whole number, not {text[:40]!r}")
    return int(text)


def real(request: Request, name: str) -> float | None:
    text = request.query_params.get(name, "").strip()
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise Unanswerable(422, f"{name} must be a number, not {text[:40]!r}")
    return value
