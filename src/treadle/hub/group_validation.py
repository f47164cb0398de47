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
from itertools import chain
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
from treadle.wire.body_limits import TooMany, check_json, check_msgpack
from treadle.wire.groups import ATROPOS_KEYS, BinaryGroup, ScoredGroup, numbers, open_group, split_groups

JsonText = bytes | bytearray | msgspec.Raw

MAX_SECOND_LOOK_BYTES = 8 * 2**20
_NUMBERS = (
    "tokens", "masks", "scores", "advantages", "ref_logprobs", "inference_logprobs", "distill_token_ids",
    "distill_logprobs", "env_id", "policy_version", "item",
)  # fmt: skip

ONE_GROUP = msgspec.json.Decoder(ScoredGroup, strict=False)
MANY_GROUPS = msgspec.json.Decoder(list[msgspec.Raw])
LOGPROBS = msgspec.json.Decoder(list[list[float]] | None)
GZIP_WBITS = 16 + zlib.MAX_WBITS  # zlib reads a gzip header
FEED_BYTES = 2**16
STEP_BYTES = 2**20
MAX_MEMBERS = 4096  # parallel compressors write one for each 64 KiB or more

# ---- groups in JSON


def _read_json(body: bytes | bytearray, rules: GroupRules, *, is_list: bool) -> list[NewGroup]:
    """A body that is one group or a list of groups. Those of a list are read one after the other: as objects they take
    many times the memory of the body."""
    try:
        check_json(body)
    except TooMany as error:
        raise unprocessable("too_many", (), str(error)) from None
    if not is_list:
        return [_admit_json(body, rules, ())]
    texts = _split(body)
    check_count(len(texts))
    return [_admit_json(text, rules, (index,)) for index, text in enumerate(texts)]


def _split(body: bytes | bytearray) -> Sequence[JsonText]:
    try:
        return decode(body, MANY_GROUPS)
    except Refused as refused:
        groups = _second_look(body, refused)
        if not isinstance(groups, list):
            raise
        return [json.dumps(group).encode() for group in groups]


def _admit_json(text: JsonText, rules: GroupRules, loc: Loc) -> NewGroup:
    """Tries first to decode a group whose numbers are all numbers, with ids and masks in range.

    Checking the range while decoding takes a tenth of the time of a check afterwards. Encoding floating-point numbers
    again would take longer than all checks, so the text of the logprobs is kept as it came.
    """
    try:
        group = _quick_decoder(id_limit(rules)).decode(text)
        logprobs = group.inference_logprobs
        group.inference_logprobs = LOGPROBS.decode(logprobs)
    except (ValueError, RecursionError):  # what is wrong with it, if anything, is found out below
        return _admit_slowly(text, rules, loc)
    refuse_any(_problems(group, rules, loc, ids_are_in_range=True), known_env(group.env_id, rules))
    return _packed(group, loc, logprobs)


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
        # The same problems, with the place of this group in the list.
        detail = [{**each, "loc": ["body", *loc, *each["loc"][1:]]} for each in refused.detail]
        located = Refused(refused.status, detail, reason=refused.reason)
        group = _decode_again(bytes(text), located, rules, loc)
    refuse_any(_problems(group, rules, loc), known_env(group.env_id, rules))
    return _packed(group, loc)


def _decode_again(text: bytes, refused: Refused, rules: GroupRules, loc: Loc) -> ScoredGroup:
    """What Python's own JSON writer sends: true as a score, and NaN.

    True and false are taken as 1 and 0. NaN is refused in any case, but with the field named.
    """
    try:
        value = _second_look(text, refused)
        if isinstance(value, dict):
            value |= {key: _bools_as_ints(value[key]) for key in _NUMBERS if key in value}
        group = msgspec.convert(value, ScoredGroup, strict=False)
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


def _bools_as_ints(value: Any) -> Any:
    if isinstance(value, list):
        return [_bools_as_ints(element) for element in value]
    return int(value) if isinstance(value, bool) else value


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
        for i, row in enumerate(group.tokens):
            yield from id_problems(row, rules, (*loc, "tokens", i))
        for i, row in enumerate(group.masks):
            if row and not (min(row) in INT32 and max(row) in INT32):
                yield problem("int_out_of_range", (*loc, "masks", i), "must fit in 32 bits")
    yield from number_problems(group, loc)
    yield from origin_problems(group, rules, loc)
    yield from free_form_problems(group, loc)


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


def _read_binary(body: bytes | bytearray, rules: GroupRules) -> list[NewGroup]:
    try:
        packed_groups = split_groups(body)
    except (msgspec.DecodeError, RecursionError):
        raise unprocessable("value_error", (), "the body is no list of packed groups") from None
    check_count(len(packed_groups))
    return [_admit_packed(packed, rules, (index,)) for index, packed in enumerate(packed_groups)]


def _admit_packed(packed: bytes, rules: GroupRules, loc: Loc) -> NewGroup:
    try:
        check_msgpack(packed)
        group = open_group(packed)
    except TooMany as error:
        raise unprocessable("too_many", loc, str(error)) from None
    except (msgspec.DecodeError, RecursionError):
        raise unprocessable("value_error", loc, "the group cannot be read") from None
    env_id = known_env(group.env_id, rules)
    refuse_any(_packed_problems(group, rules, loc), env_id)
    if group.rest is not None:
        rest = group.rest
        overrides = override_problems(rest, len(group.lengths), loc)
        refuse_any(chain(overrides, number_problems(rest, loc), free_form_problems(rest, loc)), env_id)
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


def _packed_problems(group: BinaryGroup, rules: GroupRules, loc: Loc) -> Iterator[Problem]:
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
    yield from id_problems(numbers("i", group.tokens), rules, (*loc, "tokens"))
    logprobs = group.inference_logprobs
    if logprobs is not None and not math.isfinite(sum(numbers("f", logprobs))):
        yield problem("finite_number", (*loc, "inference_logprobs"), "must be finite numbers")
    where = first_not_finite(group.scores)
    if where is not None:
        yield problem("finite_number", (*loc, "scores", *where), "must be a finite number")
    yield from origin_problems(group, rules, loc)


# ---- whole bodies


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
    if request.kind == "binary":
        groups = _read_binary(plain, request.rules)
    else:
        groups = _read_json(plain, request.rules, is_list=request.kind == "groups")
    return Admitted(groups=groups, body_hash=body_hash)


# ---- gzip


def inflate(packed: bytes | bytearray, limit: int) -> bytearray:
    """Step by step, so that a small body that would become gigabytes costs no more than the limit.

    It is fed in small pieces: zlib copies what it leaves over, and millions of empty members would each copy it all.
    """
    body = bytearray()
    view = memoryview(packed)
    inflater = zlib.decompressobj(GZIP_WBITS)
    at, num_members = 0, 1
    try:
        while at < len(packed):
            if inflater.eof:  # a gzip file may have several members, one after the other
                inflater, num_members = zlib.decompressobj(GZIP_WBITS), num_members + 1
            if num_members > MAX_MEMBERS:
                raise zlib.error("too many members")
            fed: bytes | memoryview = view[at : at + FEED_BYTES]
            at += len(fed)
            while fed:
                body += inflater.decompress(fed, STEP_BYTES)
                if len(body) > limit:
                    raise too_large(limit)
                fed = inflater.unconsumed_tail
            at -= len(inflater.unused_data)
        if packed and not inflater.eof:
            raise zlib.error("the end is missing")
    except zlib.error:
        raise Refused(400, "Invalid gzip payload", reason="bad_gzip") from None
    return body
