"""Let rank 0 publish, while the other ranks help with what needs all of them.

    rank 0    mode.publish(LeadingPolicy)  ──"served_weights"──>  every rank gathers the same weights, one at a time
                                           ──"score_tokens"────>  every rank runs the same forward pass
                                           ──"" (done)─────────>  the other ranks go on to the next step

Sync modes know nothing of ranks: which calls they make, and in which order, is their business.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec
import torch
from torch import Tensor

from treadle.sync.protocol import Publishable, PublishResult, SyncMode, TokenScores
from treadle.train.policy import Policy

PHASE = "publishing the weights"
Publish = Callable[[Publishable, int], PublishResult]
T = TypeVar("T")


class _Call(msgspec.Struct):
    """What rank 0 is about to do with the policy; no name: the publish is complete."""

    name: str = ""
    token_ids: list[int] = []


class LeadingPolicy:
    """The policy as rank 0 publishes it: every call that needs all ranks is announced to the others first."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.vocab_size = policy.vocab_size
        self.dtype: torch.dtype = policy.dtype
        self.device: torch.device = policy.device
        self.serves_copies = policy.serves_copies

    def served_shapes(self) -> list[tuple[str, tuple[int, ...]]]:
        return self._policy.served_shapes()

    def write_live_weights(self) -> None:
        self._announce("write_live_weights")
        self._policy.write_live_weights()

    def served_weights(self) -> Iterator[tuple[str, Tensor]]:
        self._announce("served_weights")
        weights = self._policy.served_weights()
        try:
            yield from weights
        finally:
            deque(weights, maxlen=0)  # the others gather all of them, even if an error ends this early

    def served_adapter(self) -> Iterator[tuple[str, Tensor]]:
        self._announce("served_adapter")
        return self._policy.served_adapter()

    def score_tokens(self, token_ids: Sequence[int]) -> TokenScores:
        self._announce("score_tokens", token_ids)
        return self._policy.score_tokens(token_ids)

    def save_model(self, root: Path, name: str) -> Path:
        return self._policy.write_served(self.served_weights(), root, name)

    def save_weights(self, root: Path, name: str, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> Path:
        return self._policy.save_weights(root, name, tensors, metadata)

    def save_adapter(self, root: Path, name: str) -> Path:
        self._announce("saved_live")
        return self._policy.save_adapter(root, name)

    def complete(self) -> None:
        self._announce("")

    def _announce(self, name: str, token_ids: Sequence[int] = ()) -> None:
        self._policy.ranks.broadcast(PHASE, msgspec.msgpack.encode(_Call(name, list(token_ids))))


_FOLLOWED: Mapping[str, Callable[[Policy, _Call], object]] = {
    "write_live_weights": lambda policy, _: policy.write_live_weights(),
    "served_weights": lambda policy, _: deque(policy.served_weights(), maxlen=0),
    "served_adapter": lambda policy, _: deque(policy.served_adapter(), maxlen=0),
    "score_tokens": lambda policy, call: policy.score_tokens(call.token_ids),
    "saved_live": lambda policy, _: deque(policy.saved_live(), maxlen=0),
}


def publish_with_ranks(publish: Publish, policy: Policy, version: int) -> PublishResult:
    """`publish` on rank 0; the other ranks do their part of it. If it fails, rank 0 ends, and they with it."""
    started = time.monotonic()
    result = _led(policy, lambda leading: publish(leading, version))
    return result or PublishResult(version=version, wait_s=0.0, write_s=time.monotonic() - started)


class Welcome:
    """Gives the published version to engines that join while the trainer waits for a batch (feed.Aside)."""

    def __init__(self, mode: SyncMode, policy: Policy) -> None:
        self._mode = mode
        self._policy = policy

    def due(self) -> Callable[[], None] | None:
        welcome = self._mode.welcome()
        return None if welcome is None else partial(_led, self._policy, welcome)

    def take_part(self) -> None:
        _follow(self._policy)


def _led(policy: Policy, act: Callable[[Publishable], T]) -> T | None:
    """`act` on rank 0, with the help of the others, for which it returns None."""
    ranks = policy.ranks
    with ranks.during(PHASE):
        if ranks.size == 1:
            return act(policy)
        if not ranks.leads:
            _follow(policy)
            return None
        leading = LeadingPolicy(policy)
        result = act(leading)
        leading.complete()
        return result


def _follow(policy: Policy) -> None:
    while (call := msgspec.msgpack.decode(policy.ranks.broadcast(PHASE), type=_Call)).name:
        _FOLLOWED[call.name](policy, call)
