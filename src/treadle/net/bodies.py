"""Read JSON bodies, write JSON responses, and cancel the work for clients that disconnect."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from treadle.errors import RequestError
from treadle.wire.counting import TooMany, check_json

T = TypeVar("T")


def json_answer(value: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


async def read_json(http: Request, kind: type[T], *, max_bytes: int) -> T:
    """The body as a `kind`; none at all reads as an empty object. What cannot be read is the sender's mistake."""
    raw = bytearray()
    async for chunk in http.stream():
        raw += chunk
        if len(raw) > max_bytes:
            raise RequestError(f"the body is larger than {max_bytes >> 20} MiB")
    try:
        check_json(raw)
        return msgspec.json.decode(raw or b"{}", type=kind)
    except TooMany as error:
        raise RequestError(f"the body has too many values: {error}") from None
    except UnicodeDecodeError:
        raise RequestError("the body is not UTF-8") from None
    except RecursionError:
        raise RequestError("the body is nested too deeply") from None
    except msgspec.DecodeError as error:  # a ValidationError is one too
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
