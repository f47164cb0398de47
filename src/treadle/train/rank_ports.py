"""How a trainer of several ranks meets the world: rank 0 speaks with hub, engine and sinks, the others through it.

Each class has the shape of what it stands for, so the loop runs on every rank as if there were no others.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Protocol

from treadle.sync.protocol import Publishable, Receipt
from treadle.track import Metric
from treadle.train.feed import Feed
from treadle.train.ranks import Ranks
from treadle.train.stop import StopRequested
from treadle.wire import binary
from treadle.wire.groups import LeasedBatch
from treadle.wire.hub import RegisterTrainer

DONE, WAITING, STOPPED = b"d", b"w", b"s"  # first byte of what rank 0 says about the feed
SIGN_EVERY_S = 10.0  # rank 0 says that it still waits, and notices then when another rank is gone
SIGNS_PER_TIMEOUT = 4  # at least
PHASE = "waiting for a batch"


class HubPort(Feed, Protocol):
    """What the trainer process wants of the hub, beside batches."""

    def register(self, registration: RegisterTrainer) -> None: ...

    def give_back(self, reason: str, *, counts: bool) -> None: ...


def open_feed(
    ranks: Ranks, check_stop: Callable[[], None], open_hub: Callable[[Callable[[], None]], HubPort]
) -> HubPort:
    """The feed of this rank; `open_hub` is given what to call while it waits."""
    if ranks.size == 1:
        return open_hub(check_stop)
    return LeadingFeed(ranks, check_stop, open_hub) if ranks.leads else FollowingFeed(ranks)


class LeadingFeed:
    """Rank 0's: leases, and hands what it got to the others, who are told every now and then that it still waits."""

    def __init__(
        self, ranks: Ranks, check_stop: Callable[[], None], open_hub: Callable[[Callable[[], None]], HubPort]
    ) -> None:
        self._ranks = ranks
        self._check_stop = check_stop
        self._hub = open_hub(self._check)
        self._is_waited_for = False
        self._last_sign = 0.0
        self._sign_every_s = min(SIGN_EVERY_S, ranks.timeout_s / SIGNS_PER_TIMEOUT)

    def register(self, registration: RegisterTrainer) -> None:
        self._hub.register(registration)

    def lease(self, step: int) -> LeasedBatch:
        return binary.unpack_batch(self._tell(lambda: binary.pack_batch(self._hub.lease(step))))

    def lease_ahead(self, step: int) -> None:
        def act() -> bytes:
            self._hub.lease_ahead(step)
            return b""

        self._tell(act)  # the others wait too: for longer than they would in what comes next

    def ack(self, batch: LeasedBatch) -> None:
        self._hub.ack(batch)

    def give_back(self, reason: str, *, counts: bool) -> None:
        self._hub.give_back(reason, counts=counts)

    def _tell(self, act: Callable[[], bytes]) -> bytes:
        self._is_waited_for, self._last_sign = True, time.monotonic()
        try:
            result = act()
        except StopRequested:
            self._ranks.tell(PHASE, STOPPED)
            raise
        finally:
            self._is_waited_for = False
        self._ranks.tell(PHASE, DONE + result)
        return result

    def _check(self) -> None:
        self._check_stop()
        if self._is_waited_for and time.monotonic() - self._last_sign > self._sign_every_s:
            self._ranks.tell(PHASE, WAITING)
            self._last_sign = time.monotonic()


class FollowingFeed:
    """Everybody else's: what rank 0 leased, as bytes of our wire format."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def register(self, registration: RegisterTrainer) -> None:
        """Rank 0 does."""

    def lease(self, step: int) -> LeasedBatch:
        return binary.unpack_batch(self._wait())

    def lease_ahead(self, step: int) -> None:
        self._wait()

    def ack(self, batch: LeasedBatch) -> None:
        """Rank 0 does."""

    def give_back(self, reason: str, *, counts: bool) -> None:
        """Rank 0 does."""

    def _wait(self) -> bytes:
        while True:
            message = self._ranks.tell(PHASE)
            kind, content = message[:1], message[1:]
            if kind == STOPPED:
                raise StopRequested
            if kind == DONE:
                return content


class FollowingSync:
    """Takes over the new weights; rank 0 is in the middle of its own publish then, with the engine held."""

    def publish(self, policy: Publishable, version: int) -> Receipt:
        started = time.monotonic()
        policy.write_live_weights()
        return Receipt(version=version, wait_s=0.0, write_s=time.monotonic() - started)


class FollowingTracker:
    """Writes nothing: rank 0's metrics are those of all."""

    def log(self, step: int, metrics: Mapping[str, Metric]) -> None: ...

    def truncate_after(self, step: int) -> None: ...

    def close(self) -> None: ...
