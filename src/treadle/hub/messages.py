"""Decode JSON messages and gzip bodies; refuse what does not fit with the field named.

No web framework here: validation workers import this module too.
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec

# ---- refusals


class Refused(Exception):
    """`detail` goes to the client; `reason` is the word under which it is counted, for `env_id` where that is known."""

    def __init__(
        self,
        status: int,
        detail: Any,
        headers: Mapping[str, str] | None = None,
        *,
        reason: str = "refused",
        env_id: int | None = None,
    ) -> None:
        super().__init__(status)
        self.status = status
        self.detail = detail
        self.headers = headers
        self.reason = reason
        self.env_id = env_id


def unprocessable(kind: str, loc: Sequence[str | int], msg: str, value: Any = None) -> Refused:
    """422 in the form that clients of FastAPI servers know."""
    return Refused(422, [problem(kind, loc, msg, value)], reason=kind)


def problem(kind: str, loc: Sequence[str | int], msg: str, value: Any = None) -> dict[str, Any]:
    return {"type": kind, "loc": ["body", *loc], "msg": msg, "input": value}


def word(refusal: Exception) -> str:
    """What an exception is counted under: QueueFull -> queue_full"""
    name = type(refusal).__name__
    return "".join(f"_{char.lower()}" if char.isupper() else char for char in name).lstrip("_")


# ---- JSON messages

T = TypeVar("T")
Flat = TypeVar("Flat", bound=msgspec.Struct)

MAX_ECHO_BYTES = 2**20  # beyond it, finding the offending value again is not worth the time
MAX_NAME_CHARS = 255
MAX_TEXT_CHARS = 4096
LONG_TEXTS = ("checkpoint_dir", "reason", "problem", "fix", "state")  # the others are names
INT64 = range(-(2**63), 2**63)
MAX_DIGITS = 18  # of the numbers in messages: steps are added to, and the sum must still fit in 64 bits

_AT = re.compile(r"(?P<what>.*?)(?: - at `\$(?P<path>.*)`)?", re.DOTALL)
_STEP = re.compile(r"\.(?P<key>\w+)|\[(?P<index>\d+)\]")
_MISSING = re.compile(r"Object missing required field `(?P<key>\w+)`")
_BYTE = re.compile(r"\(byte (?P<offset>\d+)\)")
_EXPECTED = re.compile(r"Expected `(?P<wanted>[^`]*)`, got `(?P<got>\w+)`")
_KINDS = {
    ("int", "float"): "int_from_float", ("int", "str"): "int_parsing", ("float", "str"): "float_parsing",
    ("int", ""): "int_type", ("float", ""): "float_type", ("str", ""): "string_type", ("array", ""): "list_type",
}  # fmt: skip
_NUMBER_TYPES = (int, float, int | None, float | None)


def read(body: bytes | bytearray, decoder: msgspec.json.Decoder[Flat]) -> Flat:
    """A flat message. True and false count as 1 and 0 where a number belongs, as they do in Python."""
    try:
        return decode(body, decoder)
    except Refused as refused:
        if b"true" not in body and b"false" not in body:
            raise
        try:
            plain = msgspec.json.decode(body)
            for field in msgspec.structs.fields(decoder.type):
                if field.type in _NUMBER_TYPES and isinstance(plain.get(field.encode_name), bool):
                    plain[field.encode_name] = int(plain[field.encode_name])
            return msgspec.convert(plain, decoder.type, strict=False)
        except (ValueError, AttributeError, RecursionError):
            raise refused from None


def decode(body: bytes | bytearray | msgspec.Raw, decoder: msgspec.json.Decoder[T]) -> T:
    if not body:
        raise unprocessable("missing", (), "Field required")
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


def whole_number(text: str) -> int | None:
    """The number that a path, a query or a header says; None when it says none, or one too long to be sent on."""
    digits = text.removeprefix("-")
    return int(text) if digits.isascii() and digits.isdecimal() and len(text) <= MAX_DIGITS else None


def checked_header(value: str | None, name: str) -> str | None:
    """The value of a header that is stored; None when it was not sent."""
    if value is not None and not 0 < len(value) <= MAX_NAME_CHARS:
        raise Refused(422, f"{name} must have 1 to {MAX_NAME_CHARS} characters", reason="bad_header")
    return value


def check_values(message: msgspec.Struct) -> None:
    """Refuse what parses but cannot be stored or sent on: infinities, integers past 64 bits, endless names."""
    for field in message.__struct_fields__:
        value = getattr(message, field)
        if isinstance(value, float) and not math.isfinite(value):
            raise unprocessable("finite_number", (field,), "must be a finite number")
        if isinstance(value, int) and abs(value) >= 10**MAX_DIGITS:
            raise unprocessable("int_out_of_range", (field,), f"must have at most {MAX_DIGITS} digits")
        if isinstance(value, str):
            longest = MAX_TEXT_CHARS if field in LONG_TEXTS else MAX_NAME_CHARS
            if len(value) > longest:
                raise unprocessable("too_large_text", (field,), f"must have at most {longest} characters", value[:20])
            if "\0" in value or not _is_text(value):
                raise unprocessable("value_error", (field,), "must be text without NUL")


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:  # half of a surrogate pair: JSON can say it, nothing else can
        return False
    return True


def _named(complaint: str, body: bytes | bytearray | msgspec.Raw) -> Refused:
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
    kind = _KINDS.get((wanted, got)) or _KINDS.get((wanted, "")) or "model_attributes_type"
    return unprocessable(kind, loc, f"expected {wanted}, got {got}", _echo(body, loc))


def _echo(body: bytes | bytearray | msgspec.Raw, loc: list[str | int]) -> Any:
    """The offending value when it is small; never the whole body back at the sender."""
    if memoryview(body).nbytes > MAX_ECHO_BYTES:
        return None
    try:
        value = msgspec.json.decode(body)
        for step in loc:
            value = value[step]
    except (ValueError, RecursionError, LookupError, TypeError):  # what follows the bad value may be bad as well
        return None
    if isinstance(value, str):
        return value[:100]
    is_small = isinstance(value, float | bool) or (isinstance(value, int) and value in INT64)
    return value if is_small else None


# ---- gzip

FEED_BYTES = 2**16
STEP_BYTES = 2**20
MAX_MEMBERS = 4096  # parallel compressors write one for each 64 KiB or more


def inflate(packed: bytes | bytearray, limit: int) -> bytearray:
    """Step by step, so that a small body that would become gigabytes costs no more than the limit.

    It is fed in small pieces: zlib copies what it leaves over, and millions of empty members would each copy it all.
    """
    body = bytearray()
    view = memoryview(packed)
    inflater = _gzip_inflater()
    at, num_members = 0, 1
    while at < len(packed):
        if inflater.eof:  # a gzip file may have several members, one after the other
            inflater, num_members = _gzip_inflater(), num_members + 1
        if num_members > MAX_MEMBERS:
            raise bad_gzip()
        fed: bytes | memoryview = view[at : at + FEED_BYTES]
        at += len(fed)
        while fed:
            try:
                body += inflater.decompress(fed, STEP_BYTES)
            except zlib.error:
                raise bad_gzip() from None
            if len(body) > limit:
                raise too_large(limit)
            fed = inflater.unconsumed_tail
        at -= len(inflater.unused_data)
    if packed and not inflater.eof:
        raise bad_gzip()
    return body


def bad_gzip() -> Refused:
    return Refused(400, "Invalid gzip payload", reason="bad_gzip")


def too_large(limit: int) -> Refused:
    size = f"{limit // 2**20} MiB" if limit >= 2**20 else f"{limit} bytes"
    return Refused(413, f"the body is larger than {size}", reason="too_large")


def _gzip_inflater() -> zlib._Decompress:
    return zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)
