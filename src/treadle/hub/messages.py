"""Decode JSON messages and check posted groups; refuse what does not fit, with the field named.

Each check of a group, which came in JSON or in binary form, yields problems with their location. No web framework is
imported here: validation workers use this module too.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any, TypeVar

import msgspec

from treadle.wire.groups import BinaryGroup, RareFields, ScoredGroup

T = TypeVar("T")
Flat = TypeVar("Flat", bound=msgspec.Struct)

MAX_ECHO_BYTES = 2**20  # beyond it, finding the offending value again is not worth the time
MAX_NAME_CHARS = 255
MAX_TEXT_CHARS = 4096
LONG_TEXTS = ("checkpoint_dir", "reason", "problem", "fix", "state")  # the others are names
INT64 = range(-(2**63), 2**63)
MAX_DIGITS = 18  # of the numbers in messages: steps are added to, and the sum must still fit in 64 bits

_NOT_TEXT = re.compile("[\0\ud800-\udfff]")  # NUL, or half of a surrogate pair: JSON can say it, nothing else can
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
_UNFIT = {
    "too_deep": f"must be nested at most {MAX_DEPTH} levels deep",
    "int_out_of_range": "integers must fit in 64 bits",
    "finite_number": "must hold finite numbers only",
    "value_error": "must be plain JSON",
}

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


def problem(kind: str, loc: Sequence[str | int], msg: str, value: Any = None) -> Problem:
    """`value` is echoed, except an integer of more than 64 bits, which the encoder refuses."""
    is_huge = isinstance(value, int) and value not in INT64
    return {"type": kind, "loc": ["body", *loc], "msg": msg, "input": None if is_huge else value}


def too_large(limit: int) -> Refused:
    size = f"{limit // 2**20} MiB" if limit >= 2**20 else f"{limit} bytes"
    return Refused(413, f"the body is larger than {size}", reason="too_large")


def word(refusal: Exception) -> str:
    """What an exception is counted under: QueueFull -> queue_full"""
    name = type(refusal).__name__
    return "".join(f"_{char.lower()}" if char.isupper() else char for char in name).lstrip("_")


# ---- JSON messages


def read(body: bytes | bytearray, decoder: msgspec.json.Decoder[Flat]) -> Flat:
    """A flat message. Unless the decoder is strict, true and false count as 1 and 0 where a number belongs, as they do
    in Python."""
    try:
        return decode(body, decoder)
    except Refused as refused:
        if decoder.strict or (b"true" not in body and b"false" not in body):
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
            if _NOT_TEXT.search(value):
                raise unprocessable("value_error", (field,), "must be text without NUL")


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
    return value if isinstance(value, int | float) else None


# ---- groups


class GroupRules(msgspec.Struct, kw_only=True):
    """What the hub knows that a group must agree with; None: not known yet, so everything agrees."""

    num_envs: int = 0
    vocab_size: int | None = None
    max_token_len: int | None = None
    batch_size: int | None = None
    newest_version: int | None = None


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
        yield problem("negative_id", (*loc, i), "a token id cannot be negative", token)
    elif max(ids) >= limit:
        i, token = next((i, token) for i, token in enumerate(ids) if token >= limit)
        yield problem("out_of_vocabulary", (*loc, i), f"token ids must be below {limit}", token)


def origin_problems(group: ScoredGroup | BinaryGroup, rules: GroupRules, loc: Loc) -> Iterator[Problem]:
    """Where a group comes from: its environment, the policy it was sampled under, its item, its own figures."""
    for name in ("env_id", "policy_version", "item"):
        number = getattr(group, name)
        if number is not None and abs(number) >= 10**MAX_DIGITS:
            yield problem("int_out_of_range", (*loc, name), f"must have at most {MAX_DIGITS} digits")
    if group.env_id is not None and not 0 <= group.env_id < rules.num_envs:
        msg = "no environment has this id: register first (POST /register-env)"
        yield problem("unknown_env", (*loc, "env_id"), msg, group.env_id)
    version, newest = group.policy_version, rules.newest_version
    if version is not None and version < 0:
        yield problem("future_version", (*loc, "policy_version"), "must be 0 or more", version)
    elif version is not None and newest is not None and version > newest:
        yield problem("future_version", (*loc, "policy_version"), f"the newest version is {newest}", version)
    metrics = group.metrics or {}
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
