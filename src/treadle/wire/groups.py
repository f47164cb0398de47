"""Scored groups and the batches made of them: as Atropos' JSON with our additions, and in binary form.

Our own processes send groups in binary form: numbers as raw arrays, in little-endian order. A group of 8 x 1024 tokens
is 98 kB there and 214 kB as JSON, and decoding it is a copy. The body of POST /v1/groups (`join_groups`) and the answer
of POST /v1/lease (`BinaryAnswer`) have this form. The hub stores a group in the form in which it was posted, so a batch
may hold both.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

IGNORED = -100  # mask value of a token that is not trained
NO_LOGPROB = 1.0  # logprob value at a token that was not sampled

# The keys of a group on Atropos' wire, in its order.
ATROPOS_KEYS = (
    "tokens", "masks", "scores", "advantages", "ref_logprobs", "messages", "generation_params", "inference_logprobs",
    "overrides", "group_overrides", "images", "env_id", "distill_token_ids", "distill_logprobs",
)  # fmt: skip


def common_prefix(sequences: Sequence[list[int]]) -> int:
    """How many leading tokens all sequences share: `common_prefix([[1, 2, 3], [1, 2], [1, 2, 9]]) == 2`.

    It is the common prefix of the first and the last in lexicographic order, which lists find without a Python loop.
    """
    first, last = min(sequences), max(sequences)
    differences = (place for place, (a, b) in enumerate(zip(first, last, strict=False)) if a != b)
    return next(differences, len(first))


class ScoredGroup(msgspec.Struct, kw_only=True):
    """G rollouts of one prompt with their scores.

    `masks[i]` is -100 where a token is not trained and the token id where it is; `inference_logprobs[i]` is 1.0 where
    a token was not sampled. The last four fields are ours: absent when an Atropos client posts.
    """

    tokens: list[list[int]]
    masks: list[list[int]]
    scores: list[float]
    advantages: list[list[float]] | None = None
    ref_logprobs: list[list[float]] | None = None
    messages: list[list[dict[str, Any]]] | None = None
    generation_params: dict[str, Any] | None = None
    inference_logprobs: list[list[float]] | None = None
    overrides: list[dict[str, Any]] | None = None
    group_overrides: dict[str, Any] | None = None
    images: Any = None
    env_id: int | None = None
    distill_token_ids: list[list[list[int]]] | None = None
    distill_logprobs: list[list[list[float]]] | None = None
    policy_version: int | None = None  # the oldest version that any of its tokens was sampled under
    item: int | None = None  # the environment's ordinal of the prompt
    metrics: dict[str, float] | None = None  # for example {"accuracy": 0.25}
    weight: float = 1.0  # the hub's: what a stale group still counts; its advantages are multiplied by it

    @property
    def size(self) -> int:
        return len(self.tokens)


class TaughtGroup(ScoredGroup, kw_only=True):
    """A group inside of the trainer, with what its teacher answered. It is never sent to a hub."""

    teacher_logprobs: list[list[float]]  # of each token; NaN where the teacher was not asked


def taught_group(group: ScoredGroup, teacher_logprobs: list[list[float]]) -> TaughtGroup:
    fields = {name: getattr(group, name) for name in ScoredGroup.__struct_fields__}
    return TaughtGroup(**fields, teacher_logprobs=teacher_logprobs)


def fingerprint(group: ScoredGroup) -> int:
    """A group's name wherever it is read: the same for the same tokens and scores, in all likelihood for no others."""
    digest = hashlib.blake2b(digest_size=8)
    for row in group.tokens:
        digest.update(array("q", [len(row), *row]))
    digest.update(array("d", group.scores))
    return int.from_bytes(digest.digest(), "little")


class LeasedBatch(msgspec.Struct, kw_only=True):
    """The groups of one optimizer step, held by one trainer until it acknowledges them."""

    step: int  # the optimizer step that these groups are for; also the name of the batch
    token: str  # fencing token: an acknowledgement under an older one is refused
    lease_s: float
    groups: list[ScoredGroup]


class LeaseAnswer(msgspec.Struct, kw_only=True):
    """The answer of POST /v1/lease."""

    batch: LeasedBatch | None
    reason: str = ""  # why there is no batch, in words


# ---- binary form

BINARY_TYPE = "application/x-treadle"  # of both shapes
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
    teacher_logprobs: bytes | None = None  # float32; between the ranks of a trainer


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


def unpack_answer(body: bytes) -> LeaseAnswer:
    answer = _ANSWER.decode(body)
    if answer.batch is None:
        return LeaseAnswer(batch=None, reason=answer.reason)
    return LeaseAnswer(batch=_leased(answer.batch))


def pack_batch(batch: LeasedBatch) -> bytes:
    """For another process of the same trainer."""
    groups = [
        StoredForm(
            binary=pack_group(group),
            weight=group.weight,
            teacher_logprobs=_packed("f", group.teacher_logprobs) if isinstance(group, TaughtGroup) else None,
        )
        for group in batch.groups
    ]
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
    if stored.teacher_logprobs is not None:
        return taught_group(group, rows("f", stored.teacher_logprobs, [len(row) for row in group.tokens]))
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
