"""Groups in our binary form: the arrays are looked through as they are, and the bytes are kept as they came."""

from __future__ import annotations

import math
from collections.abc import Iterator

import msgspec

from treadle.hub.checks import (
    Loc,
    Problem,
    Rules,
    check_count,
    first_not_finite,
    free_form_problems,
    id_problems,
    known_env,
    number_problems,
    origin_problems,
    override_problems,
    refuse_any,
    size_problems,
)
from treadle.hub.refusals import problem, unprocessable
from treadle.store.records import NewGroup
from treadle.wire import binary
from treadle.wire.counting import TooMany, check_msgpack


def read_packed_groups(body: bytes | bytearray, rules: Rules) -> list[NewGroup]:
    try:
        packed_groups = binary.split_groups(body)
    except (msgspec.DecodeError, RecursionError):
        raise unprocessable("value_error", (), "the body is no list of packed groups") from None
    check_count(len(packed_groups))
    return [_admit_packed(packed, rules, (index,)) for index, packed in enumerate(packed_groups)]


def _admit_packed(packed: bytes, rules: Rules, loc: Loc) -> NewGroup:
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


def _packed_problems(group: binary.BinaryGroup, rules: Rules, loc: Loc) -> Iterator[Problem]:
    yield from size_problems(group.lengths, rules, loc)
    num_bytes = 4 * sum(group.lengths)
    for name in ("tokens", "masks", "inference_logprobs"):
        raw = getattr(group, name)
        if raw is not None and len(raw) != num_bytes:
            msg = f"{len(raw)} bytes for {num_bytes // 4} tokens of 4 bytes each"
            yield problem("length_mismatch", (*loc, name), msg, len(raw))
            return  # the numbers cannot be told apart
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
