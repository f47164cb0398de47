"""Validity rules for posted groups, in JSON or binary form. Each check yields problems with their location."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any

import msgspec

from treadle.hub.messages import INT64, MAX_DIGITS, MAX_NAME_CHARS, Refused, problem, unprocessable
from treadle.wire.binary import BinaryGroup, RareFields
from treadle.wire.groups import ScoredGroup

Loc = tuple[str | int, ...]
Problem = dict[str, Any]

MAX_PROBLEMS = 10
MAX_GROUPS = 10_000
MAX_METRICS = 1000
MAX_SEQUENCES = 65_536
MAX_DEPTH = 32
ID_LIMIT = 2**31  # ids are 32-bit numbers in our binary form
INT32 = range(-ID_LIMIT, ID_LIMIT)
_JSON_TYPES = {str, int, float, bool, type(None), list, dict}
_FREE_FORM = ("messages", "generation_params", "overrides", "group_overrides", "images")


class GroupRules(msgspec.Struct, kw_only=True):
    """What the hub knows that a group must agree with; None: not known yet, so everything agrees."""

    num_envs: int = 0
    vocab_size: int | None = None
    max_token_len: int | None = None
    batch_size: int | None = None
    newest_version: int | None = None
    needs_version: bool = False


def check_count(num_groups: int) -> None:
    if num_groups > MAX_GROUPS:
        raise unprocessable("too_many", (), f"at most {MAX_GROUPS} groups in one request", num_groups)


def refuse_any(problems: Iterator[Problem] | Sequence[Problem], env_id: int | None) -> None:
    found = list(islice(problems, MAX_PROBLEMS))
    if found:
        raise Refused(422, found, reason=str(found[0]["type"]), env_id=env_id)


def known_env(env_id: int | None, rules: GroupRules) -> int | None:
    """Refusals are counted for environments that exist; what a client makes up is nobody's."""
    return env_id if env_id is not None and 0 <= env_id < rules.num_envs else None


def size_problems(lengths: Sequence[int], rules: GroupRules, loc: Loc) -> Iterator[Problem]:
    num_sequences = len(lengths)
    at = (*loc, "tokens")
    if not lengths:
        yield problem("too_short", at, "a group needs at least one sequence", 0)
    if num_sequences > MAX_SEQUENCES:
        yield problem("too_many", at, f"at most {MAX_SEQUENCES} sequences in a group", num_sequences)
    elif rules.batch_size is not None and num_sequences > rules.batch_size:
        msg = f"the trainer's batches have {rules.batch_size} sequences: a larger group can never be part of one"
        yield problem("oversize", at, msg, num_sequences)
    for i, length in enumerate(lengths):
        if length <= 0:
            yield problem("too_short", (*at, i), "a sequence needs at least one token", length)
        elif rules.max_token_len is not None and length > rules.max_token_len:
            msg = f"the trainer takes at most {rules.max_token_len} tokens a sequence"
            yield problem("too_long", (*at, i), msg, length)


def id_limit(rules: GroupRules) -> int:
    return min(rules.vocab_size or ID_LIMIT, ID_LIMIT)


def id_problems(ids: Sequence[int], rules: GroupRules, loc: Loc) -> Iterator[Problem]:
    if not ids:
        return
    limit = id_limit(rules)
    if min(ids) < 0:
        i, token = next((i, token) for i, token in enumerate(ids) if token < 0)
        yield problem("negative_id", (*loc, i), "a token id cannot be negative", _echo(token))
    elif max(ids) >= limit:
        i, token = next((i, token) for i, token in enumerate(ids) if token >= limit)
        yield problem("out_of_vocabulary", (*loc, i), f"token ids must be below {limit}", _echo(token))


def _echo(number: int) -> int | None:
    return number if number in INT64 else None


def origin_problems(group: ScoredGroup | BinaryGroup, rules: GroupRules, loc: Loc) -> Iterator[Problem]:
    """Where a group comes from: its environment, the policy it was sampled under, its item, its own figures."""
    for name in ("env_id", "policy_version", "item"):
        number = getattr(group, name)
        if number is not None and abs(number) >= 10**MAX_DIGITS:
            yield problem("int_out_of_range", (*loc, name), f"must have at most {MAX_DIGITS} digits")
    if group.env_id is not None and not 0 <= group.env_id < rules.num_envs:
        msg = "no environment has this id: register first (POST /register-env)"
        yield problem("unknown_env", (*loc, "env_id"), msg, _echo(group.env_id))
    version, newest = group.policy_version, rules.newest_version
    if version is None and rules.needs_version:
        msg = "this hub takes no group of an unknown policy version (--unversioned refuse)"
        yield problem("unknown_version", (*loc, "policy_version"), msg)
    elif version is not None and version < 0:
        yield problem("future_version", (*loc, "policy_version"), "must be 0 or more", _echo(version))
    elif version is not None and newest is not None and version > newest:
        yield problem("future_version", (*loc, "policy_version"), f"the newest version is {newest}", _echo(version))
    yield from _metric_problems(group.metrics or {}, loc)


def _metric_problems(metrics: Mapping[str, float], loc: Loc) -> Iterator[Problem]:
    if len(metrics) > MAX_METRICS:
        yield problem("too_many", (*loc, "metrics"), f"at most {MAX_METRICS} of them", len(metrics))
    for name, value in metrics.items():
        at = (*loc, "metrics", name[:100].encode(errors="replace").decode())  # half a surrogate pair cannot be sent
        if len(name) > MAX_NAME_CHARS:
            yield problem("too_large_text", at, f"names must have at most {MAX_NAME_CHARS} characters", len(name))
        if not math.isfinite(value):
            yield problem("finite_number", at, "must be a finite number")


def override_problems(group: ScoredGroup | RareFields, num_sequences: int, loc: Loc) -> Iterator[Problem]:
    """They are looked up by the number of the sequence; an empty list is none."""
    if group.overrides and len(group.overrides) != num_sequences:
        msg = f"{len(group.overrides)} overrides for {num_sequences} sequences in tokens"
        yield problem("length_mismatch", (*loc, "overrides"), msg, len(group.overrides))


def number_problems(group: ScoredGroup | RareFields, loc: Loc) -> Iterator[Problem]:
    if _unfit(group.distill_token_ids, MAX_DEPTH) is not None:
        yield problem("int_out_of_range", (*loc, "distill_token_ids"), "must fit in 64 bits")
    for name in ("scores", "advantages", "ref_logprobs", "inference_logprobs", "distill_logprobs"):
        where = first_not_finite(getattr(group, name, None))
        if where is not None:
            yield problem("finite_number", (*loc, name, *where), "must be a finite number")


def first_not_finite(values: Any) -> Loc | None:
    """The indices of the first number that is not finite, in lists nested as deep as they are."""
    if not values:
        return None
    if not isinstance(values[0], list):
        if math.isfinite(sum(values)):  # a sum is finite only when each part is: much faster than to ask each
            return None
        return next(((i,) for i, value in enumerate(values) if not math.isfinite(value)), None)
    for i, inner in enumerate(values):
        where = first_not_finite(inner)
        if where is not None:
            return (i, *where)
    return None


def free_form_problems(group: ScoredGroup | RareFields, loc: Loc) -> Iterator[Problem]:
    for name in _FREE_FORM:
        kind = _unfit(getattr(group, name), MAX_DEPTH + 1)
        if kind is not None:
            yield problem(kind, (*loc, name), _UNFIT[kind])
    for i, conversation in enumerate(group.messages or ()):
        for j, message in enumerate(conversation):
            if "role" not in message or "content" not in message:
                yield problem("value_error", (*loc, "messages", i, j), "Message must have 'role' and 'content' fields")


_UNFIT = {
    "too_deep": f"must be nested at most {MAX_DEPTH} levels deep",
    "int_out_of_range": "integers must fit in 64 bits",
    "finite_number": "must hold finite numbers only",
    "value_error": "must be plain JSON",
}


def _unfit(value: Any, depth: int) -> str | None:
    """Why a value of any shape cannot be sent on to every reader; msgpack can say more than JSON.

    Level by level, with loops that run in C: a call of Python for each value would take a minute for a large body.
    """
    level = [value]
    while level:
        kinds = set(map(type, level))
        if not kinds <= _JSON_TYPES:
            return "value_error"
        ints = [each for each in level if type(each) is int] if int in kinds else []
        if ints and not (min(ints) in INT64 and max(ints) in INT64):
            return "int_out_of_range"
        if float in kinds and not all(math.isfinite(each) for each in level if type(each) is float):
            return "finite_number"
        containers = [each for each in level if type(each) in (list, dict)] if kinds & {list, dict} else []
        if containers and depth == 0:
            return "too_deep"
        if any(not all(type(key) is str for key in each) for each in containers if type(each) is dict):
            return "value_error"
        depth -= 1
        level = [*chain.from_iterable(each.values() if type(each) is dict else each for each in containers)]
    return None
