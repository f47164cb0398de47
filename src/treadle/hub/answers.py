"""What the hub says back: JSON answers, refusals with a status, compression when the client asks for it."""

from __future__ import annotations

import asyncio
import gzip
import sqlite3
from collections.abc import Awaitable, Callable, Mapping
from typing import Any
from uuid import uuid4

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse

from treadle.errors import DiskFull
from treadle.faults import reach
from treadle.hub.refusals import Refused, word
from treadle.log import get_logger
from treadle.store import BatchPruned, HeldByAnother, KeyReused, QueueFull, StaleToken, StorageFailed

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
