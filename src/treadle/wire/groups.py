"""A scored group, in Atropos' shape with our additions, and the batches made of groups."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
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
