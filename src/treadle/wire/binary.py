"""Groups as our own processes send them to each other: numbers as raw arrays, in little-endian order.

A group of 8 x 1024 tokens is 98 kB here and 214 kB as JSON, and to read it is to copy it. Two shapes cross the
border: the body of POST /v1/groups (`join_groups`) and the answer of POST /v1/lease (`pack_answer`). The hub stores a
group in the form it came in, so a batch may hold both.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from treadle.wire.groups import LeasedBatch, ScoredGroup
from treadle.wire.hub import LeaseAnswer

CONTENT_TYPE = "application/x-treadle"  # of both shapes
_SWAPPED = sys.byteorder != "little"
_PLAIN = ("env_id", "policy_version", "item", "metrics", "scores")


class RareFields(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The fields that are seldom there, as they are."""

    advantages: list[list[float]] | None = None
    ref_logprobs: list[list[float]] | None = None
    messages: list[list[dict[str, Any]]] | None = None
    generation_params: dict[str, Any] | None = None
    overrides: list[dict[str, Any]] | None = None
    group_overrides: dict[str, Any] | None = None
    images: Any = None
    distill_token_ids: list[list[list[int]]] | None = None
    distill_logprobs: list[list[list[float]]] | None = None


class BinaryGroup(msgspec.Struct, kw_only=True, omit_defaults=True):
    """`lengths` tells where one sequence ends in the arrays and the next begins."""

    lengths: list[int]
    tokens: bytes  # int32
    masks: bytes  # int32
    scores: list[float]
    inference_logprobs: bytes | None = None  # float32
    env_id: int | None = None
    policy_version: int | None = None
    item: int | None = None
    metrics: dict[str, float] | None = None
    rest: RareFields | None = None


class StoredForm(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A group in the form the hub keeps it in; what it knows of a JSON group is beside it."""

    json: bytes | None = None
    binary: bytes | None = None
    policy_version: int | None = None
    item: int | None = None
    metrics: bytes | None = None  # JSON object
    weight: float = 1.0


class BinaryBatch(msgspec.Struct, kw_only=True):
    step: int
    token: str
    lease_s: float
    groups: list[StoredForm]


class BinaryAnswer(msgspec.Struct, kw_only=True):
    batch: BinaryBatch | None
    reason: str = ""


_GROUP = msgspec.msgpack.Decoder(BinaryGroup)
_GROUPS = msgspec.msgpack.Decoder(list[bytes])
_BATCH = msgspec.msgpack.Decoder(BinaryBatch)
_ANSWER = msgspec.msgpack.Decoder(BinaryAnswer)
_JSON_GROUP = msgspec.json.Decoder(ScoredGroup)
_METRICS = msgspec.json.Decoder(dict[str, float])


def join_groups(packed: Sequence[bytes]) -> bytes:
    """The body of one post."""
    return msgspec.msgpack.encode(packed)


def split_groups(body: bytes | bytearray) -> list[bytes]:
    """The single groups of a body, still packed."""
    return _GROUPS.decode(body)


def pack_group(group: ScoredGroup) -> bytes:
    logprobs = group.inference_logprobs
    rest = RareFields(**{name: getattr(group, name) for name in RareFields.__struct_fields__})
    return msgspec.msgpack.encode(
        BinaryGroup(
            lengths=[len(row) for row in group.tokens],
            tokens=_packed("i", group.tokens),
            masks=_packed("i", group.masks),
            inference_logprobs=None if logprobs is None else _packed("f", logprobs),
            rest=None if rest == RareFields() else rest,
            **{name: getattr(group, name) for name in _PLAIN},
        )
    )


def open_group(packed: bytes) -> BinaryGroup:
    """The fields, with the numbers still raw. Raises msgspec.DecodeError."""
    return _GROUP.decode(packed)


def unpack_group(packed: bytes) -> ScoredGroup:
    group = open_group(packed)
    logprobs = group.inference_logprobs
    return ScoredGroup(
        tokens=rows("i", group.tokens, group.lengths),
        masks=rows("i", group.masks, group.lengths),
        inference_logprobs=None if logprobs is None else rows("f", logprobs, group.lengths),
        **{name: getattr(group, name) for name in _PLAIN},
        **(msgspec.structs.asdict(group.rest) if group.rest else {}),
    )


def pack_answer(answer: BinaryAnswer) -> bytes:
    return msgspec.msgpack.encode(answer)


def unpack_answer(body: bytes) -> LeaseAnswer:
    answer = _ANSWER.decode(body)
    if answer.batch is None:
        return LeaseAnswer(batch=None, reason=answer.reason)
    return LeaseAnswer(batch=_leased(answer.batch))


def pack_batch(batch: LeasedBatch) -> bytes:
    """For another process of the same trainer."""
    groups = [StoredForm(binary=pack_group(group), weight=group.weight) for group in batch.groups]
    return msgspec.msgpack.encode(BinaryBatch(step=batch.step, token=batch.token, lease_s=batch.lease_s, groups=groups))


def unpack_batch(packed: bytes) -> LeasedBatch:
    return _leased(_BATCH.decode(packed))


def _leased(batch: BinaryBatch) -> LeasedBatch:
    groups = [from_stored(stored) for stored in batch.groups]
    return LeasedBatch(step=batch.step, token=batch.token, lease_s=batch.lease_s, groups=groups)


def from_stored(stored: StoredForm) -> ScoredGroup:
    if stored.binary is not None:
        group = unpack_group(stored.binary)
    else:
        group = _JSON_GROUP.decode(stored.json or b"")
        group.policy_version, group.item = stored.policy_version, stored.item
        group.metrics = None if stored.metrics is None else _METRICS.decode(stored.metrics)
    group.weight = stored.weight
    return group


def numbers(kind: str, raw: bytes) -> array[Any]:
    """Raw numbers as an array: kind "i" is int32, "f" float32."""
    values = array(kind)
    values.frombytes(raw)
    if _SWAPPED:
        values.byteswap()
    return values


def rows(kind: str, raw: bytes, lengths: Sequence[int]) -> list[list[Any]]:
    flat = numbers(kind, raw).tolist()
    cut, start = [], 0
    for length in lengths:
        cut.append(flat[start : start + length])
        start += length
    return cut


def _packed(kind: str, sequences: Iterable[Iterable[float]]) -> bytes:
    values: array[Any] = array(kind)
    for sequence in sequences:
        values.extend(sequence)
    if _SWAPPED:
        values.byteswap()
    return values.tobytes()
