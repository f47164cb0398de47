"""Request bodies: read with a limit on their size. How slowly they may come is the server's rule (wire/http_limits)."""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import msgspec
from starlette.requests import Request

from treadle.hub.inflate import inflate, too_large
from treadle.hub.messages import check_values, read
from treadle.hub.refusals import Refused, unprocessable
from treadle.hub.routing import JSON
from treadle.wire.binary import CONTENT_TYPE

T = TypeVar("T", bound=msgspec.Struct)

MAX_MESSAGE_BYTES = 2**20  # registrations and the like; groups have their own limits
MAX_LENGTH_DIGITS = 18


class Body(NamedTuple):
    content: bytes | bytearray
    is_gzip: bool


async def read_message(request: Request, decoder: msgspec.json.Decoder[T]) -> T:
    """A small JSON body as a typed message; 4xx with the field named when it is none."""
    body = await read_body(request, JSON, max_packed=MAX_MESSAGE_BYTES, max_plain=MAX_MESSAGE_BYTES)
    content = inflate(body.content, MAX_MESSAGE_BYTES) if body.is_gzip else body.content
    message = read(content, decoder)
    check_values(message)
    return message


async def read_body(request: Request, content_type: str, *, max_packed: int, max_plain: int) -> Body:
    """The bytes as they were sent, maybe compressed. 413 when they are too many."""
    sent_type = request.headers.get("content-type", "").split(";")[0].strip().lower()
    is_json = sent_type.startswith("application/") and sent_type.endswith("+json")
    if sent_type != content_type and not (is_json and content_type == JSON):
        if content_type == CONTENT_TYPE:
            raise Refused(415, f"the body must be sent as Content-Type: {CONTENT_TYPE}", reason="content_type")
        raise unprocessable("model_attributes_type", (), "the body must be sent as Content-Type: application/json")
    encoding = request.headers.get("content-encoding", "").strip().lower()
    is_gzip = "gzip" in encoding
    if not is_gzip and encoding not in ("", "identity"):
        detail = "There was an error parsing the body: send it plain or with Content-Encoding: gzip"
        raise Refused(400, detail, reason="content_encoding")
    limit = max_packed if is_gzip else max_plain
    announced = request.headers.get("content-length", "0")
    if len(announced) > MAX_LENGTH_DIGITS or (announced.isdecimal() and int(announced) > limit):
        raise too_large(limit)
    received = bytearray()
    async for chunk in request.stream():
        received += chunk
        if len(received) > limit:
            raise too_large(limit)
    return Body(received, is_gzip)
