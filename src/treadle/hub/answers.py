"""What the hub says back: JSON answers, refusals with a status, compression when the client asks for it."""

from __future__ import annotations

import asyncio
import gzip
import sqlite3
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any
from uuid import uuid4

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from treadle.errors import DiskFull
from treadle.log import get_logger
from treadle.store import HeldByAnother, KeyReused, QueueFull, StaleToken, StorageFailed

Handler = Callable[[Request], Awaitable[Response]]

MIN_COMPRESSED_BYTES = 1000
COMPRESS_LEVEL = 1  # token ids shrink to a third already; higher levels cost ten times the time
COMPRESS_ELSEWHERE_BYTES = 256 * 1024  # from here on it would hold up other requests: done in a thread
RETRY_AFTER_S = "2"
log = get_logger("hub")


class Refused(Exception):
    """An answer other than 200, raised from wherever it is found out. `detail` goes to the client."""

    def __init__(self, status: int, detail: Any, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(status)
        self.status = status
        self.detail = detail
        self.headers = headers


def unprocessable(kind: str, loc: Sequence[str | int], msg: str, value: Any = None) -> Refused:
    """422 in the form that clients of FastAPI servers know."""
    return Refused(422, [problem(kind, loc, msg, value)])


def problem(kind: str, loc: Sequence[str | int], msg: str, value: Any = None) -> dict[str, Any]:
    return {"type": kind, "loc": ["body", *loc], "msg": msg, "input": value}


def json_answer(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return raw_json(msgspec.json.encode(value), status, headers)


def raw_json(body: bytes, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(body, status, dict(headers or {}), media_type="application/json")


def answering(handler: Handler) -> Handler:
    """The one place where an error becomes an answer. What a client reads is always our own words."""

    async def answer(request: Request) -> Response:
        try:
            response = await handler(request)
        except Refused as refused:
            log.debug("refused", path=request.url.path, status=refused.status, detail=refused.detail)
            response = json_answer({"detail": refused.detail}, refused.status, refused.headers)
        except (StaleToken, HeldByAnother, KeyReused) as refusal:
            response = json_answer({"detail": refusal.message}, 409)
        except (QueueFull, StorageFailed) as refusal:
            response = json_answer({"detail": refusal.message}, 503, {"Retry-After": RETRY_AFTER_S})
        except DiskFull as refusal:
            response = json_answer({"detail": refusal.message}, 507)
        except ClientDisconnect:
            return Response(status_code=400)  # nobody is there to read it
        except sqlite3.Error:
            log.error("read_failed", exc_info=True, path=request.url.path)
            response = json_answer({"detail": "the queue cannot be read"}, 503, {"Retry-After": RETRY_AFTER_S})
        except Exception:
            incident = uuid4().hex[:12]  # ties the answer to the trace in the log, and tells nothing else
            log.error("internal_error", exc_info=True, path=request.url.path, incident=incident)
            response = json_answer({"detail": "internal error", "incident": incident}, 500)
        return await _compressed(request, response)

    return answer


async def http_error(_: Request, error: Exception) -> Response:
    """Unknown paths and methods."""
    assert isinstance(error, HTTPException)  # noqa: S101 - registered for no other
    return json_answer({"detail": error.detail}, error.status_code, error.headers)


async def _compressed(request: Request, response: Response) -> Response:
    accepted = request.headers.get("accept-encoding", "").lower()
    body = bytes(response.body)
    if "gzip" not in accepted or len(body) < MIN_COMPRESSED_BYTES:
        return response
    if len(body) >= COMPRESS_ELSEWHERE_BYTES:
        packed = await asyncio.to_thread(gzip.compress, body, COMPRESS_LEVEL)
    else:
        packed = gzip.compress(body, COMPRESS_LEVEL)
    response.body = packed
    response.headers["content-length"] = str(len(packed))
    response.headers["content-encoding"] = "gzip"
    response.headers["vary"] = "Accept-Encoding"
    return response
