"""The files of the page, held in memory, with headers that allow them nothing but this hub."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response

from treadle.dash.query import Unanswerable

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


@dataclass(frozen=True, slots=True)
class StaticFile:
    body: bytes
    media_type: str
    etag: str


class StaticFiles:
    """Everything in page/ and vendor/ that a browser may ask for, by its bare name."""

    def __init__(self) -> None:
        self._files = {
            entry.name: _load(entry.read_bytes(), entry.name)
            for folder in ("page", "vendor")
            for entry in files("treadle.dash").joinpath(folder).iterdir()
            if entry.name.rpartition(".")[2] in TYPES
        }

    def answer(self, request: Request, name: str) -> Response:
        found = self._files.get(name)
        if found is None:
            raise Unanswerable(404, "there is no such file")
        headers = {**HEADERS, "ETag": found.etag}
        if request.headers.get("if-none-match") == found.etag:
            return Response(status_code=304, headers=headers)
        return Response(found.body, headers=headers, media_type=found.media_type)


def _load(body: bytes, name: str) -> StaticFile:
    digest = hashlib.sha256(body).hexdigest()[:16]
    return StaticFile(body, TYPES[name.rpartition(".")[2]], f'"{digest}"')
