"""Validate posted groups: bytes and rules in, groups that can be stored and trained out.

Pure. JSON groups are decoded, checked and written again with just Atropos' keys; binary groups are checked in place and
stored as they came. Validation workers run this in processes of their own.
"""

from __future__ import annotations

import hashlib
import json
import math
import zlib
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Annotated, Any, Literal, get_type_hints

import msgspec

from treadle.hub.messages import (
    INT32,
    GroupRules,
    Loc,
    Problem,
    Refused,
    check_count,
    decode,
    first_not_finite,
    free_form_problems,
    id_limit,
    id_problems,
    known_env,
    number_problems,
    origin_problems,
    override_problems,
    problem,
    refuse_any,
    size_problems,
    too_large,
    unprocessable,
)
from treadle.store.records import NewGroup
from treadle.wire import binary
from treadle.wire.counting import TooMany, check_json, check_msgpack
from treadle.wire.groups import ATROPOS_KEYS, ScoredGroup

JsonText = bytes | bytearray | msgspec.Raw

MAX_SECOND_LOOK_BYTES = 8 * 2**20
_NUMBERS = (
    "tokens", "masks", "scores", "advantages", "ref_logprobs", "inference_logprobs", "distill_token_ids",
    "distill_logprobs", "env_id", "policy_version", "item",
)  # fmt: skip

ONE_GROUP = msgspec.json.Decoder(ScoredGroup, strict=False)
MANY_GROUPS = msgspec.json.Decoder(list[msgspec.Raw])
LOGPROBS = msgspec.json.Decoder(list[list[float]] | None)
FEED_BYTES = 2**16
STEP_BYTES = 2**20
MAX_MEMBERS = 4096  # parallel compressors write one for each 64 KiB or more

# ---- groups in JSON


def read_group(body: bytes | bytearray, rules: GroupRules) -> list[NewGroup]:
    """A body that is one group."""
    _check_counts(body)
    return [_admit_json(body, rules, ())]


def read_groups(body: bytes | bytearray, rules: GroupRules) -> list[NewGroup]:
    """A body that is a list of groups. They are read one after the other: as objects they take many times the memory
    of the body."""
    _check_counts(body)
    texts = _split(body)
    check_count(len(texts))
    return [_admit_json(text, rules, (index,)) for index, text in enumerate(texts)]


def _check_counts(body: bytes | bytearray) -> None:
    try:
        check_json(body)
    except TooMany as error:
        raise unprocessable("too_many", (), str(error)) from None


def _split(body: bytes | bytearray) -> Sequence[JsonText]:
    try:
        return decode(body, MANY_GROUPS)
    except Refused as refused:
        groups = _second_look(body, refused)
        if not isinstance(groups, list):
            raise
        return [json.dumps(group).encode() for group in groups]


def _admit_json(text: JsonText, rules: GroupRules, loc: Loc) -> NewGroup:
    try:
        group, logprobs = _decode_quickly(text, id_limit(rules))
    except (ValueError, RecursionError):  # what is wrong with it, if anything, is found out below
        return _admit_slowly(text, rules, loc)
    refuse_any(_problems(group, rules, loc, ids_are_in_range=True), known_env(group.env_id, rules))
    return _packed(group, loc, logprobs)


def _decode_quickly(text: JsonText, id_limit: int) -> tuple[ScoredGroup, msgspec.Raw | None]:
    """A group whose numbers are all numbers, with ids and masks in range; and the text of its logprobs.

    Checking the range while decoding takes a tenth of the time of a check afterwards. Encoding floating-point numbers
    again would take longer than all checks, so their text is kept as it came.
    """
    group = _quick_decoder(id_limit).decode(text)
    logprobs = group.inference_logprobs
    group.inference_logprobs = LOGPROBS.decode(logprobs)
    return group, logprobs


@lru_cache(maxsize=16)
def _quick_decoder(id_limit: int) -> msgspec.json.Decoder[Any]:
    required = {
        "tokens": list[list[Annotated[int, msgspec.Meta(ge=0, lt=id_limit)]]],
        "masks": list[list[Annotated[int, msgspec.Meta(ge=INT32.start, lt=INT32.stop)]]],
        "scores": list[float],
    }
    others = {name: kind for name, kind in get_type_hints(ScoredGroup).items() if name not in required}
    others["inference_logprobs"] = msgspec.Raw
    defaults = {"inference_logprobs": msgspec.Raw(b"null"), "weight": 1.0}
    fields: list[Any] = [*required.items(), *((name, kind, defaults.get(name)) for name, kind in others.items())]
    return msgspec.json.Decoder(msgspec.defstruct("QuickGroup", fields, kw_only=True))


def _admit_slowly(text: JsonText, rules: GroupRules, loc: Loc) -> NewGroup:
    """With all that real clients send in place of numbers, and with a name for what is wrong."""
    try:
        group = decode(text, ONE_GROUP)
    except Refused as refused:
        group = _decode_again(bytes(text), _under(loc, refused), rules, loc)
    refuse_any(_problems(group, rules, loc), known_env(group.env_id, rules))
    return _packed(group, loc)


def _decode_again(text: bytes, refused: Refused, rules: GroupRules, loc: Loc) -> ScoredGroup:
    """What Python's own JSON writer sends: true as a score, and NaN.

    True and false are taken as 1 and 0. NaN is refused in any case, but with the field named.
    """
    try:
        group = msgspec.convert(_with_numbers(_second_look(text, refused)), ScoredGroup, strict=False)
    except (ValueError, RecursionError):
        raise refused from None
    if refused.reason == "json_invalid":
        refuse_any(_problems(group, rules, loc), known_env(group.env_id, rules))
        raise unprocessable("finite_number", loc, "NaN and Infinity are not JSON numbers") from None
    return group


def _second_look(body: bytes | bytearray, refused: Refused) -> Any:
    """The body as Python reads it. What is no JSON for other reasons than NaN, like half a surrogate pair, stays so."""
    signs = (b"NaN", b"Infinity") if refused.reason == "json_invalid" else (b"true", b"false")
    if len(body) > MAX_SECOND_LOOK_BYTES or not any(sign in body for sign in signs):
        raise refused
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        raise refused from None


def _with_numbers(value: Any) -> Any:
    if isinstance(value, dict):
        return value | {key: _bools_as_ints(value[key]) for key in _NUMBERS if key in value}
    return value


def _bools_as_ints(value: Any) -> Any:
    if isinstance(value, list):
        return [_bools_as_ints(element) for element in value]
    return int(value) if isinstance(value, bool) else value


def _under(loc: Loc, refused: Refused) -> Refused:
    """The same, said of one group of a list."""
    detail = [{**each, "loc": ["body", *loc, *each["loc"][1:]]} for each in refused.detail]
    return Refused(refused.status, detail, reason=refused.reason)


def _packed(group: ScoredGroup, loc: Loc, logprobs: msgspec.Raw | None = None) -> NewGroup:
    """`logprobs`: their text, when it is known to be good."""
    fields = {key: getattr(group, key) for key in ATROPOS_KEYS}
    if logprobs is not None:
        fields["inference_logprobs"] = logprobs
    try:
        payload = msgspec.json.encode(fields)
        metrics = None if group.metrics is None else msgspec.json.encode(group.metrics)
    except (RecursionError, ValueError, OverflowError):
        raise unprocessable("value_error", loc, "the group cannot be written as JSON") from None
    return NewGroup(
        payload=payload,
        size=len(group.tokens),
        num_tokens=sum(map(len, group.tokens)),
        env_id=group.env_id,
        policy_version=group.policy_version,
        item=group.item,
        metrics=metrics,
    )


def _problems(group: ScoredGroup, rules: GroupRules, loc: Loc, *, ids_are_in_range: bool = False) -> Iterator[Problem]:
    yield from size_problems([len(row) for row in group.tokens], rules, loc)
    yield from _length_problems(group, loc)
    if not ids_are_in_range:
        yield from _range_problems(group, rules, loc)
    yield from number_problems(group, loc)
    yield from origin_problems(group, rules, loc)
    yield from free_form_problems(group, loc)


def _range_problems(group: ScoredGroup, rules: GroupRules, loc: Loc) -> Iterator[Problem]:
    for i, row in enumerate(group.tokens):
        yield from id_problems(row, rules, (*loc, "tokens", i))
    for i, row in enumerate(group.masks):
        if row and not (min(row) in INT32 and max(row) in INT32):
            yield problem("int_out_of_range", (*loc, "masks", i), "must fit in 32 bits")


def _length_problems(group: ScoredGroup, loc: Loc) -> Iterator[Problem]:
    """Token-level `advantages` may have any length: clients send one number a sequence there as well."""
    num_sequences = len(group.tokens)
    yield from override_problems(group, num_sequences, loc)
    for name in ("masks", "scores", "inference_logprobs"):
        rows = getattr(group, name)
        if rows is not None and len(rows) != num_sequences:
            msg = f"{len(rows)} {name} for {num_sequences} sequences in tokens"
            yield problem("length_mismatch", (*loc, name), msg, len(rows))
    for name in ("masks", "inference_logprobs"):
        for i, (row, tokens) in enumerate(zip(getattr(group, name) or (), group.tokens, strict=False)):
            if len(row) != len(tokens):
                msg = f"{len(row)} values for the {len(tokens)} tokens of sequence {i}"
                yield problem("length_mismatch", (*loc, name, i), msg, len(row))


# ---- groups in binary form


def read_packed_groups(body: bytes | bytearray, rules: GroupRules) -> list[NewGroup]:
    try:
        packed_groups = binary.split_groups(body)
    except (msgspec.DecodeError, RecursionError):
        raise unprocessable("value_error", (), "the body is no list of packed groups") from None
    check_count(len(packed_groups))
    return [_admit_packed(packed, rules, (index,)) for index, packed in enumerate(packed_groups)]


def _admit_packed(packed: bytes, rules: GroupRules, loc: Loc) -> NewGroup:
    try:
        check_msgpack(packed)
        group = binary.open_group(packed)
    except TooMany as error:
        raise unprocessable("too_many", loc, str(error)) from None
    except (msgspec.DecodeError, RecursionError):
        raise unprocessable("value_error", loc, "the group cannot be read") from None
    env_id = known_env(group.env_id, rules)
    refuse_any(_packed_problems(group, rules, loc), env_id)
    if group.rest is not None:
        refuse_any(_rest_problems(group.rest, len(group.lengths), loc), env_id)
    return NewGroup(
        payload=packed,
        format="binary",
        size=len(group.lengths),
        num_tokens=sum(group.lengths),
        env_id=group.env_id,
        policy_version=group.policy_version,
        item=group.item,
        metrics=None if group.metrics is None else msgspec.json.encode(group.metrics),
    )


def _rest_problems(rest: binary.RareFields, num_sequences: int, loc: Loc) -> Iterator[Problem]:
    yield from override_problems(rest, num_sequences, loc)
    yield from number_problems(rest, loc)
    yield from free_form_problems(rest, loc)


def _packed_problems(group: binary.BinaryGroup, rules: GroupRules, loc: Loc) -> Iterator[Problem]:
    yield from size_problems(group.lengths, rules, loc)
    num_bytes = 4 * sum(group.lengths)
    for name in ("tokens", "masks", "inference_logprobs"):
        raw = getattr(group, name)
        if raw is not None and len(raw) != num_bytes:
            msg = f"{len(raw)} bytes for {num_bytes // 4} tokens of 4 bytes each"
            yield problem("length_mismatch", (*loc, name), msg, len(raw))
            return  # which bytes are which number is not known
    if len(group.scores) != len(group.lengths):
        msg = f"{len(group.scores)} scores for {len(group.lengths)} sequences"
        yield problem("length_mismatch", (*loc, "scores"), msg, len(group.scores))
    yield from id_problems(binary.numbers("i", group.tokens), rules, (*loc, "tokens"))
    logprobs = group.inference_logprobs
    if logprobs is not None and not math.isfinite(sum(binary.numbers("f", logprobs))):
        yield problem("finite_number", (*loc, "inference_logprobs"), "must be finite numbers")
    where = first_not_finite(group.scores)
    if where is not None:
        yield problem("finite_number", (*loc, "scores", *where), "must be a finite number")
    yield from origin_problems(group, rules, loc)


# ---- whole bodies

READERS = {"group": read_group, "groups": read_groups, "binary": read_packed_groups}


class ValidationRequest(msgspec.Struct, kw_only=True):
    """How to read a body."""

    kind: Literal["group", "groups", "binary"]
    rules: GroupRules
    is_gzip: bool = False
    with_hash: bool = False
    max_bytes: int = 64 * 2**20
    max_cpu_s: float = 20.0


class Admitted(msgspec.Struct, kw_only=True):
    groups: list[NewGroup]
    body_hash: bytes = b""  # of the inflated body: a client that compresses again may get other bytes


def admit(body: bytes | bytearray, request: ValidationRequest) -> Admitted:
    """The groups of a body, checked; raises `Refused`. One bad group refuses the whole body: it is stored whole or
    not at all."""
    plain = inflate(body, request.max_bytes) if request.is_gzip else body
    body_hash = hashlib.sha256(plain).digest() if request.with_hash else b""
    return Admitted(groups=READERS[request.kind](plain, request.rules), body_hash=body_hash)


# ---- gzip


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
            raise _bad_gzip()
        fed: bytes | memoryview = view[at : at + FEED_BYTES]
        at += len(fed)
        while fed:
            try:
                body += inflater.decompress(fed, STEP_BYTES)
            except zlib.error:
                raise _bad_gzip() from None
            if len(body) > limit:
                raise too_large(limit)
            fed = inflater.unconsumed_tail
        at -= len(inflater.unused_data)
    if packed and not inflater.eof:
        raise _bad_gzip()
    return body


def _bad_gzip() -> Refused:
    return Refused(400, "Invalid gzip payload", reason="bad_gzip")


def _gzip_inflater() -> zlib._Decompress:
    return zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)
