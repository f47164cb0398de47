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

from treadle.engines.api.context import RequestStats
from treadle.engines.model_folder import ADAPTER_FILES
from treadle.errors import RequestError, TreadleError, UserError
from treadle.net.access import EVERYBODY, why_refused
from treadle.net.server import json_answer, read_json
from treadle.net.tokens import Role

MAX_BODY_BYTES = 16 << 20
OPENAI_PREFIX = "/v1/"
FORBIDDEN = 403
# Roles by route: everyone may read, environments and trainers may sample, only trainers change weights and adapters.
SAMPLING = ("/generate", "/health_generate", "/v1/completions", "/v1/chat/completions")
SAMPLERS: frozenset[Role] = frozenset({"environment", "trainer"})
PUBLISHERS: frozenset[Role] = frozenset({"trainer"})
CLIENT_LEFT = 499

T = TypeVar("T")
Handler = Callable[[Request], Awaitable[Response]]


class NotFound(RequestError):
    """A path, a model or an adapter does not exist."""


def route(path: str, handler: Handler, stats: RequestStats, *, method: str = "GET") -> Route:
    """A route that checks the caller's role, maps errors to responses, and counts requests."""
    roles = SAMPLERS if path in SAMPLING else EVERYBODY if method == "GET" else PUBLISHERS

    async def guarded(http: Request) -> Response:
        started = time.monotonic()
        why = why_refused(http.scope, roles)
        try:
            response = await handler(http) if why is None else error_response(path, FORBIDDEN, why)
        except TreadleError as error:
            response = error_response(path, http_status(error), str(error))
        except ClientDisconnect:
            response = client_left_response()  # before its whole body had arrived
        stats.count(path, response.status_code, time.monotonic() - started)
        return response

    return Route(path, guarded, methods=[method])


def http_status(error: TreadleError) -> int:
    """400 or 404 for an invalid request, 503 for what cannot be done now."""
    if isinstance(error, NotFound):
        return 404
    return 400 if isinstance(error, RequestError | UserError) else 503


def error_response(path: str, status: int, message: str) -> Response:
    return json_answer(error_body(message, status) if path.startswith(OPENAI_PREFIX) else {"error": message}, status)


def error_body(message: str, status: int) -> dict[str, object]:
    """An error in OpenAI's format."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}


async def decode(http: Request, kind: type[T]) -> T:
    content_type = http.headers.get("content-type", "application/json")
    if not content_type.startswith("application/json"):
        raise RequestError(f"the body must be application/json, not {content_type[:60]}")
    return await read_json(http, kind, max_bytes=MAX_BODY_BYTES)


def client_left_response() -> Response:
    return Response(status_code=CLIENT_LEFT)


def resolve_weights_folder(path: str, root: Path, model_folder: Path) -> Path:
    """The weights folder that a request names: the engine's own model, or a folder inside `root`."""
    folder = _resolved(path, root)
    if folder == model_folder:  # its files may be links, as in the Hugging Face cache
        return folder
    _check_inside(path, root, [folder])
    try:
        files = [folder / name for name in os.listdir(folder)]
    except OSError:
        raise _no_folder(path) from None
    _check_inside(path, root, files)
    return folder


def resolve_adapter_folder(path: str, root: Path) -> Path:
    """The adapter folder that a request names, inside `root`; relative paths are relative to it.

    Links may not lead out of `root`. Whether a path exists is disclosed only for paths inside.
    """
    folder = _resolved(path, root)
    _check_inside(path, root, [folder, *(folder / name for name in ADAPTER_FILES)])
    if not os.path.isdir(folder):
        raise _no_folder(path)
    return folder


def _check_inside(path: str, root: Path, targets: Iterable[Path]) -> None:
    for target in targets:
        if not Path(os.path.realpath(target)).is_relative_to(root):
            raise RequestError(
                f"{_cut(path)} is not in {root}, the folder from which this engine loads adapters and weights",
                fix="save it there, or start the engine with another --adapter-root",
            )


def _resolved(path: str, base: Path) -> Path:
    """os.path instead of Path, because it does not raise for a path that is too long or not permitted."""
    try:
        return Path(os.path.realpath(base / os.path.expanduser(path)))
    except ValueError:  # a NUL
        raise _no_folder(path) from None


def _no_folder(path: str) -> NotFound:
    return NotFound(f"there is no folder {_cut(path)} on the engine's machine", fix="give a path that both sides see")


def _cut(path: str) -> str:
    return path if len(path) <= 300 else path[:300] + "..."
