"""What the routes share: the store, the settings, who was seen when, the bell for waiting trainers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from treadle.config.schema import HubConfig
from treadle.hub.batching import choose
from treadle.store import LeaseTerms, Store

Clock = Callable[[], float]
GONE_AFTER_S = 10.0  # environments call several times a second; one silent for this long is taken to be gone


class Bell:
    """Wakes the calls that wait for a batch. Listen first, then look, then wait: no ring can be missed."""

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self.closing = False

    def listen(self) -> asyncio.Event:
        return self._event

    def ring(self) -> None:
        self._event.set()
        self._event = asyncio.Event()

    def close(self) -> None:
        """The process ends: whoever waits is answered now."""
        self.closing = True
        self.ring()


class Presence:
    """When each environment was last heard of. In memory: a restart gives all a full period again."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._since_s = clock()
        self._seen_s: dict[int, float] = {}

    def mark(self, env_id: int) -> None:
        self._seen_s[env_id] = self._clock()

    def idle_s(self, env_id: int) -> float:
        return self._clock() - self._seen_s.get(env_id, self._since_s)

    def forget(self) -> None:
        self._seen_s.clear()


@dataclass(frozen=True, slots=True)
class HubState:
    store: Store
    config: HubConfig
    presence: Presence
    bell: Bell
    terms: LeaseTerms
    # Two environments of one name that register at once must not both be taken for the one that was here.
    registering: asyncio.Lock = field(default_factory=asyncio.Lock)

    @classmethod
    def build(cls, store: Store, config: HubConfig, clock: Clock) -> HubState:
        terms = LeaseTerms(lease_s=config.lease_s, max_deliveries=config.max_deliveries, choose=choose)
        return cls(store, config, Presence(clock), Bell(), terms)
