"""Wrap route handlers: map errors to responses, check roles, count requests, decode bodies, and restrict paths."""

from __future__ import annotations

import os
import time
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from treadle.engines.api.context import Ledger
from treadle.engines.interface import ADAPTER_FILES
from treadle.errors import RequestError, TreadleError, UserError
from treadle.net.access import EVERYBODY, why_refused
from treadle.net.bodies import json_answer, read_json
from treadle.net.tokens import Role

MAX_BODY_BYTES = 16 << 20
OPENAI_PREFIX = "/v1/"
FORBIDDEN = 403
# Who may use a route: everybody reads, environments and trainers sample, only trainers change weights and adapters.
SAMPLING = ("/generate", "/health_generate", "/v1/completions", "/v1/chat/completions")
SAMPLERS: frozenset[Role] = frozenset({"environment", "trainer"})
PUBLISHERS: frozenset[Role] = frozenset({"trainer"})
CLIENT_LEFT = 499

T = TypeVar("T")
Handler = Callable[[Request], Awaitable[Response]]


class NotHere(RequestError):
    """A path, a model or an adapter that does not exist."""


def route(path: str, handler: Handler, ledger: Ledger, *, method: str = "GET") -> Route:
    """A route whose errors become answers, and whose requests are counted."""
    roles = SAMPLERS if path in SAMPLING else EVERYBODY if method == "GET" else PUBLISHERS

    async def guarded(http: Request) -> Response:
        started = time.monotonic()
        why = why_refused(http.scope, roles)
        try:
            response = await handler(http) if why is None else refusal(path, FORBIDDEN, why)
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


def weights_here(path: str, root: Path, model_folder: Path) -> Path:
    """The folder of weights that a request names: the engine's own model, or one in `root`, as `adapter_here`."""
    folder = _resolved(path, root)
    if folder == model_folder:  # its files may be links, as in the cache of downloaded models
        return folder
    _refuse_outside(path, root, [folder])
    try:
        files = [folder / name for name in os.listdir(folder)]
    except OSError:
        raise _no_folder(path) from None
    _refuse_outside(path, root, files)
    return folder


def adapter_here(path: str, root: Path) -> Path:
    """The folder of an adapter that a request names: in `root`, to which a relative path belongs. Links may not lead
    out of it, and whether anything is there is said only of places inside."""
    folder = _resolved(path, root)
    _refuse_outside(path, root, [folder, *(folder / name for name in ADAPTER_FILES)])
    if not os.path.isdir(folder):
        raise _no_folder(path)
    return folder


def _refuse_outside(path: str, root: Path, places: Iterable[Path]) -> None:
    for place in places:
        if not Path(os.path.realpath(place)).is_relative_to(root):
            raise RequestError(
                f"{_cut(path)} is not in {root}, the folder from which this engine loads adapters and weights",
                fix="save it there, or start the engine with another --adapter-root",
            )


def _resolved(path: str, base: Path) -> Path:
    """os.path instead of Path: what is too long, or not allowed, is no folder, and no error of another kind."""
    try:
        return Path(os.path.realpath(base / os.path.expanduser(path)))
    except ValueError:  # a NUL
        raise _no_folder(path) from None


def _no_folder(path: str) -> NotHere:
    return NotHere(f"there is no folder {_cut(path)} on the engine's machine", fix="give a path that both sides see")


def _cut(path: str) -> str:
    return path if len(path) <= 300 else path[:300] + "..."
