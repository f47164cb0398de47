"""Read request parameters, answer with JSON, and serve the static files of the page.

A parameter that is not valid raises PageError, which `answering_errors` turns into an answer.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from importlib.resources import files

import msgspec
from starlette.requests import Request
from starlette.responses import Response

Handler = Callable[[Request], Awaitable[Response]]
MAX_DIGITS = 15
TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
    ),
    "Referrer-Policy": "no-referrer",  # the address may hold the token
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
INDEX = "index.html"


class PageError(Exception):
    """`PageError(404, "there is no group 12")`"""

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail


def answering_errors(handler: Handler) -> Handler:
    """Answer a PageError of the handler with its status and detail."""

    async def handle(request: Request) -> Response:
        try:
            return await handler(request)
        except PageError as problem:
            return as_json({"detail": problem.detail}, problem.status)

    return handle


def as_json(value: object, status: int = 200) -> Response:
    body = msgspec.json.encode(value)
    headers = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
    return Response(body, status, headers, media_type="application/json")


def int_param(request: Request, name: str) -> int | None:
    text = request.query_params.get(name, "").strip()
    if not text:
        return None
    digits = text.removeprefix("-")
    if not digits.isascii() or not digits.isdecimal() or len(digits) > MAX_DIGITS:
        raise PageError(422, f"{name} must be a whole number, not {text[:40]!r}")
    return int(text)


def float_param(request: Request, name: str) -> float | None:
    text = request.query_params.get(name, "").strip()
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise PageError(422, f"{name} must be a number, not {text[:40]!r}")
    return value


@dataclass(frozen=True, slots=True)
class StaticFile:
    body: bytes
    media_type: str
    etag: str


class StaticFiles:
    """All files in page/ and vendor/, held in memory, by file name."""

    def __init__(self) -> None:
        self._files: dict[str, StaticFile] = {}
        for folder in ("page", "vendor"):
            for entry in files("treadle.dash").joinpath(folder).iterdir():
                media_type = TYPES.get(entry.name.rpartition(".")[2])
                if media_type is not None:
                    body = entry.read_bytes()
                    etag = f'"{hashlib.sha256(body).hexdigest()[:16]}"'
                    self._files[entry.name] = StaticFile(body, media_type, etag)

    def answer(self, request: Request, name: str) -> Response:
        found = self._files.get(name)
        if found is None:
            raise PageError(404, "there is no such file")
        headers = {**HEADERS, "ETag": found.etag}
        if request.headers.get("if-none-match") == found.etag:
            return Response(status_code=304, headers=headers)
        return Response(found.body, headers=headers, media_type=found.media_type)
