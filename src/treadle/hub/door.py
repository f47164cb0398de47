"""The door: a posted group is checked here, once. What passes can be stored, sent on and trained."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, TypeVar

import msgspec

from treadle.hub.answers import Refused, problem, unprocessable
from treadle.hub.body import INT64, decode
from treadle.store import NewGroup
from treadle.wire.groups import ATROPOS_KEYS, ScoredGroup

T = TypeVar("T", ScoredGroup, list[ScoredGroup])
Loc = tuple[str | int, ...]
Problem = dict[str, Any]

MAX_PROBLEMS = 10
MAX_SECOND_LOOK_BYTES = 8 * 2**20
_NUMBERS = ("tokens", "masks", "scores", "advantages", "ref_logprobs", "inference_logprobs")

ONE_GROUP = msgspec.json.Decoder(ScoredGroup, strict=False)
MANY_GROUPS = msgspec.json.Decoder(list[ScoredGroup], strict=False)


def read_group(body: bytes) -> NewGroup:
    return _admit([_decode(body, ONE_GROUP)], in_list=False)[0]


def read_groups(body: bytes) -> list[NewGroup]:
    """One bad group refuses the whole list: a request is stored whole or not at all."""
    return _admit(_decode(body, MANY_GROUPS), in_list=True)


def _decode(body: bytes, decoder: msgspec.json.Decoder[T]) -> T:
    """Decode; where that fails, look again for what Python's own JSON writer sends: true as a score, and NaN.

    True and false are taken as 1 and 0. NaN is refused in any case, but with the field named.
    """
    try:
        return decode(body, decoder)
    except Refused as refused:
        if len(body) > MAX_SECOND_LOOK_BYTES:
            raise
        not_numbers = b"NaN" in body or b"Infinity" in body
        if not not_numbers and b"true" not in body and b"false" not in body:
            raise
        try:
            groups = msgspec.convert(_with_numbers(json.loads(body)), decoder.type, strict=False)
        except (ValueError, RecursionError):
            raise refused from None
        if not_numbers:
            in_list = isinstance(groups, list)
            _admit(groups if isinstance(groups, list) else [groups], in_list=in_list)
            raise unprocessable("finite_number", (), "NaN and Infinity are not JSON numbers") from None
        return groups


def _with_numbers(value: Any) -> Any:
    if isinstance(value, list):
        return [_with_numbers(element) for element in value]
    if isinstance(value, dict):
        return value | {key: _bools_as_ints(value[key]) for key in _NUMBERS if key in value}
    return value


def _bools_as_ints(value: Any) -> Any:
    if isinstance(value, list):
        return [_bools_as_ints(element) for element in value]
    return int(value) if isinstance(value, bool) else value


def _admit(groups: Sequence[ScoredGroup], *, in_list: bool) -> list[NewGroup]:
    admitted = []
    for index, group in enumerate(groups):
        loc: Loc = (index,) if in_list else ()
        problems = list(islice(_problems(group, loc), MAX_PROBLEMS))
        if problems:
            raise Refused(422, problems)
        admitted.append(_packed(group, loc))
    return admitted


def _packed(group: ScoredGroup, loc: Loc) -> NewGroup:
    try:
        payload = msgspec.json.encode({key: getattr(group, key) for key in ATROPOS_KEYS})
    except (RecursionError, ValueError, OverflowError):
        raise unprocessable("value_error", loc, "the group cannot be written as JSON") from None
    return NewGroup(
        payload=payload,
        size=group.size,
        num_tokens=sum(map(len, group.tokens)),
        env_id=group.env_id,
        policy_version=group.policy_version,
        item=group.item,
        metrics=None if group.metrics is None else msgspec.json.encode(group.metrics),
    )


def _problems(group: ScoredGroup, loc: Loc) -> Iterator[Problem]:
    if not group.tokens:
        yield problem("too_short", (*loc, "tokens"), "a group needs at least one sequence", 0)
    yield from _length_problems(group, loc)
    yield from _number_problems(group, loc)
    for i, conversation in enumerate(group.messages or ()):
        for j, message in enumerate(conversation):
            if "role" not in message or "content" not in message:
                yield problem("value_error", (*loc, "messages", i, j), "Message must have 'role' and 'content' fields")


def _length_problems(group: ScoredGroup, loc: Loc) -> Iterator[Problem]:
    """Token-level `advantages` may have any length: clients send one number a sequence there as well."""
    num_sequences = len(group.tokens)
    for i, tokens in enumerate(group.tokens):
        if not tokens:
            yield problem("too_short", (*loc, "tokens", i), "a sequence needs at least one token", 0)
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


def _number_problems(group: ScoredGroup, loc: Loc) -> Iterator[Problem]:
    for name in ("scores", "advantages", "ref_logprobs", "inference_logprobs", "distill_logprobs"):
        where = _first_not_finite(getattr(group, name))
        if where is not None:
            yield problem("finite_number", (*loc, name, *where), "must be a finite number")
    for key, value in (group.metrics or {}).items():
        if not math.isfinite(value):
            yield problem("finite_number", (*loc, "metrics", key), "must be a finite number")
    for name in ("env_id", "policy_version", "item"):
        number = getattr(group, name)
        if number is not None and number not in INT64:
            yield problem("int_out_of_range", (*loc, name), "must fit in 64 bits")


def _first_not_finite(values: Any) -> Loc | None:
    """The indices of the first number that is not finite, in lists nested as deep as they are."""
    if not values:
        return None
    if not isinstance(values[0], list):
        if all(map(math.isfinite, values)):
            return None
        return (next(i for i, value in enumerate(values) if not math.isfinite(value)),)
    for i, inner in enumerate(values):
        where = _first_not_finite(inner)
        if where is not None:
            return (i, *where)
    return None
