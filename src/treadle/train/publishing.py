"""Let rank 0 publish, while the other ranks help with what needs all of them.

    rank 0    mode.publish(LeadingPolicy)  ──"served_weights"──>  every rank gathers the same weights, one at a time
                                           ──"score_tokens"────>  every rank runs the same forward pass
                                           ──"waiting"─────────>  a heartbeat: rank 0 waits for the engine or a disk
                                           ──"" (done)─────────>  the other ranks go on to the next step

Sync modes know nothing of ranks: which calls they make, and in which order, is their business.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec
import torch
from torch import Tensor

from treadle.errors import ProcessDied
from treadle.sync.protocol import Publishable, PublishResult, SyncMode, TokenScores
from treadle.train.policy import Policy

PHASE = "publishing the weights"
WAITING = "waiting"
Publish = Callable[[Publishable, int], PublishResult]
T = TypeVar("T")


class _Call(msgspec.Struct):
    """What rank 0 is about to do with the policy; no name: the publish is complete."""

    name: str = ""
    token_ids: list[int] = []


class LeadingPolicy:
    """The policy as rank 0 publishes it: every call that needs all ranks is announced to the others first. Between
    two calls a thread sends heartbeats: an engine may need longer than the others wait for a message."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._lock = threading.Lock()  # one message at a time
        self._num_calls = 0  # in which the other ranks take part; they read no heartbeat until these have ended
        self._is_complete = threading.Event()
        self._lost: ProcessDied | None = None
        self.vocab_size = policy.vocab_size
        self.dtype: torch.dtype = policy.dtype
        self.device: torch.device = policy.device
        self.serves_copies = policy.serves_copies

    def served_shapes(self) -> list[tuple[str, tuple[int, ...]]]:
        return self._policy.served_shapes()

    def write_live_weights(self) -> None:
        with self._call("write_live_weights"):
            self._policy.write_live_weights()

    def served_weights(self) -> Iterator[tuple[str, Tensor]]:
        weights = self._policy.served_weights()
        with self._call("served_weights"):
            try:
                yield from weights
            finally:
                deque(weights, maxlen=0)  # the others gather all of them, even if an error ends this early

    def served_adapter(self) -> Iterator[tuple[str, Tensor]]:
        with self._call("served_adapter"):
            return iter(list(self._policy.served_adapter()))

    def score_tokens(self, token_ids: Sequence[int]) -> TokenScores:
        with self._call("score_tokens", token_ids):
            return self._policy.score_tokens(token_ids)

    def save_model(self, root: Path, name: str) -> Path:
        return self._policy.write_served(self.served_weights(), root, name)

    def save_weights(self, root: Path, name: str, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> Path:
        return self._policy.save_weights(root, name, tensors, metadata)

    def save_adapter(self, root: Path, name: str) -> Path:
        with self._call("saved_live"):
            return self._policy.save_adapter(root, name)

    @contextmanager
    def leading(self) -> Iterator[None]:
        """The block is a publish: heartbeats during it, and at its end the others go on."""
        sender = threading.Thread(target=self._send_heartbeats, name="heartbeats", daemon=True)
        sender.start()
        try:
            yield
        finally:
            self._is_complete.set()
            sender.join()
        with self._call(""):
            pass

    @contextmanager
    def _call(self, name: str, token_ids: Sequence[int] = ()) -> Iterator[None]:
        """Announce a call, in whichever thread of rank 0 it is made."""
        with self._lock:
            if self._lost is not None:
                raise self._lost
            self._num_calls += 1
            self._send(_Call(name, list(token_ids)))
        try:
            yield
        finally:
            with self._lock:
                self._num_calls -= 1

    def _send_heartbeats(self) -> None:
        while self._lost is None and not self._is_complete.wait(self._policy.ranks.heartbeat_s):
            with self._lock:
                if self._num_calls:
                    continue
                try:
                    self._send(_Call(WAITING))
                except ProcessDied as lost:  # raised by the next call
                    self._lost = lost

    def _send(self, call: _Call) -> None:
        self._policy.ranks.broadcast(PHASE, msgspec.msgpack.encode(call))


_FOLLOWED: Mapping[str, Callable[[Policy, _Call], object]] = {
    "write_live_weights": lambda policy, _: policy.write_live_weights(),
    "served_weights": lambda policy, _: deque(policy.served_weights(), maxlen=0),
    "served_adapter": lambda policy, _: deque(policy.served_adapter(), maxlen=0),
    "score_tokens": lambda policy, call: policy.score_tokens(call.token_ids),
    "saved_live": lambda policy, _: deque(policy.saved_live(), maxlen=0),
    WAITING: lambda _policy, _call: None,
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
        leader = LeadingPolicy(policy)
        with leader.leading():
            return act(leader)


def _follow(policy: Policy) -> None:
    while (call := msgspec.msgpack.decode(policy.ranks.broadcast(PHASE), type=_Call)).name:
        _FOLLOWED[call.name](policy, call)
