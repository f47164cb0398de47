"""Request bodies: read with limits, inflated as they arrive, decoded into typed messages."""

from __future__ import annotations

import asyncio
import math
import re
import zlib
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request

from treadle.hub.answers import Refused, unprocessable

T = TypeVar("T")

MAX_PACKED_BYTES = 16 * 2**20
MAX_BODY_BYTES = 64 * 2**20
INFLATE_STEP_BYTES = 2**20  # between two steps other requests get their turn
READ_TIMEOUT_S = 60.0
MAX_ECHO_BYTES = 2**20  # beyond it, finding the offending value again is not worth the time
INT64 = range(-(2**63), 2**63)

_AT = re.compile(r"(?P<what>.*?)(?: - at `\$(?P<path>.*)`)?", re.DOTALL)
_STEP = re.compile(r"\.(?P<key>\w+)|\[(?P<index>\d+)\]")
_MISSING = re.compile(r"Object missing required field `(?P<key>\w+)`")
_BYTE = re.compile(r"\(byte (?P<offset>\d+)\)")
_EXPECTED = re.compile(r"Expected `(?P<wanted>[^`]*)`, got `(?P<got>\w+)`")


async def read_json(request: Request, decoder: msgspec.json.Decoder[T]) -> T:
    """The body as a typed message; 4xx with the field named when it is none."""
    return decode(await read_body(request), decoder)


async def read_body(request: Request) -> bytes:
    """The whole JSON body, inflated. 413 when it is too large, 400 when its gzip is broken."""
    content_type = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if content_type != "application/json":
        raise unprocessable("model_attributes_type", (), "the body must be sent as Content-Type: application/json")
    is_packed = "gzip" in request.headers.get("content-encoding", "").lower()
    limit = MAX_PACKED_BYTES if is_packed else MAX_BODY_BYTES
    announced = request.headers.get("content-length", "0")
    if announced.isdigit() and int(announced) > limit:
        raise _too_large(limit)
    try:
        async with asyncio.timeout(READ_TIMEOUT_S):
            body = await (_read_packed(request) if is_packed else _read_plain(request))
    except TimeoutError:
        raise Refused(408, f"the body did not arrive within {READ_TIMEOUT_S:.0f} s") from None
    if not body:
        raise unprocessable("missing", (), "Field required")
    return body


async def _read_plain(request: Request) -> bytes:
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise _too_large(MAX_BODY_BYTES)
    return bytes(body)


async def _read_packed(request: Request) -> bytes:
    """Inflate while reading, so that a small body that claims gigabytes costs no more than the limit."""
    body = bytearray()
    num_packed = 0
    inflater = _gzip_inflater()
    async for chunk in request.stream():
        num_packed += len(chunk)
        if num_packed > MAX_PACKED_BYTES:
            raise _too_large(MAX_PACKED_BYTES)
        packed = chunk
        while packed:
            if inflater.eof:  # a gzip file may have several members, one after the other
                inflater = _gzip_inflater()
            try:
                body += inflater.decompress(packed, INFLATE_STEP_BYTES)
            except zlib.error:
                raise Refused(400, "Invalid gzip payload") from None
            if len(body) > MAX_BODY_BYTES:
                raise _too_large(MAX_BODY_BYTES)
            packed = inflater.unused_data if inflater.eof else inflater.unconsumed_tail
            if packed:
                await asyncio.sleep(0)
    if num_packed and not inflater.eof:
        raise Refused(400, "Invalid gzip payload")
    return bytes(body)


def _gzip_inflater() -> zlib._Decompress:
    return zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)


def _too_large(limit: int) -> Refused:
    return Refused(413, f"the body is larger than {limit // 2**20} MiB")


def decode(body: bytes, decoder: msgspec.json.Decoder[T]) -> T:
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _named(str(error), body) from None
    except RecursionError:
        raise unprocessable("recursion_loop", (), "the JSON is nested too deeply") from None
    except ValueError as error:  # malformed JSON, or bytes that are not UTF-8
        offset = _BYTE.search(str(error))
        at = int(offset["offset"]) if offset else 0
        raise unprocessable("json_invalid", (at,), "the body is not valid JSON") from None


def check_numbers(message: msgspec.Struct) -> None:
    """Refuse numbers that parse but cannot be stored or sent on: infinities, integers past 64 bits."""
    for field in message.__struct_fields__:
        value = getattr(message, field)
        if isinstance(value, float) and not math.isfinite(value):
            raise unprocessable("finite_number", (field,), "must be a finite number")
        if isinstance(value, int) and value not in INT64:
            raise unprocessable("int_out_of_range", (field,), "must fit in 64 bits")


def _named(complaint: str, body: bytes) -> Refused:
    """Our own words for what the decoder found, with the place as a list: ["body", "tokens", 0, 3]."""
    found = _AT.fullmatch(complaint)
    what, path = (found["what"], found["path"] or "") if found else ("", "")
    loc: list[str | int] = [step["key"] or int(step["index"]) for step in _STEP.finditer(path)]
    missing = _MISSING.fullmatch(what)
    if missing:
        return unprocessable("missing", [*loc, missing["key"]], "Field required")
    if what == "Number out of range":
        return unprocessable("finite_number", loc, "must be a finite number")
    expected = _EXPECTED.fullmatch(what)
    if not expected:
        return unprocessable("value_error", loc, "this value is not acceptable here", _echo(body, loc))
    wanted, got = expected["wanted"].split(" | ")[0], expected["got"]
    kinds = {"int": "int_type", "float": "float_type", "str": "string_type", "array": "list_type"}
    kind = "int_from_float" if (wanted, got) == ("int", "float") else kinds.get(wanted, "model_attributes_type")
    return unprocessable(kind, loc, f"expected {wanted}, got {got}", _echo(body, loc))


def _echo(body: bytes, loc: list[str | int]) -> Any:
    """The offending value when it is small; never the whole body back at the sender."""
    if len(body) > MAX_ECHO_BYTES:
        return None
    try:
        value = msgspec.json.decode(body)
        for step in loc:
            value = value[step]
    except (
        ValueError,
        RecursionError,
        LookupError,
        TypeError,
    ):  # what follows the bad value may be bad as well
        return None
    if isinstance(value, str):
        return value[:100]
    return value if isinstance(value, int | float | bool) else None
