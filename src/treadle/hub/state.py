"""What all requests of one hub share: the queue, the configuration, the porters, who was heard of, who waits."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from treadle.config.schema import HubConfig
from treadle.hub.batching import plan
from treadle.hub.board import Board
from treadle.hub.checks import Rules
from treadle.hub.metrics import Metrics
from treadle.hub.porters import Porters
from treadle.store import LeaseTerms, Limits, Store

Clock = Callable[[], float]
GONE_AFTER_S = 10.0  # environments call several times a second; one silent for this long is taken to be gone
MOST_PORTERS = 4
SETTLE_S = 1.0


ASKS_AGAIN_S = 5.0  # a trainer that polls for a batch does so more often than this


class Bell:
    """Wakes the calls that wait for a batch. Listen first, then look, then wait: no ring can be missed."""

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self.closing = False
        self._num_waiting = 0
        self._last_unmet_s: float | None = None  # when a trainer last heard that there is no batch, and got none since

    @property
    def somebody_waits(self) -> bool:
        """Whether a trainer wants a batch and there is none; some hold the call, others ask again and again."""
        unmet_s = self._last_unmet_s
        return self._num_waiting > 0 or (unmet_s is not None and time.monotonic() - unmet_s < ASKS_AGAIN_S)

    def asked(self, *, is_met: bool) -> None:
        self._last_unmet_s = None if is_met else time.monotonic()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        self._num_waiting += 1
        try:
            yield
        finally:
            self._num_waiting -= 1

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

    @property
    def is_anybody_here(self) -> bool:
        """Whether one has really called a short while ago."""
        return any(self._clock() - seen_s <= GONE_AFTER_S for seen_s in list(self._seen_s.values()))

    def is_alive(self, env_id: int) -> bool:
        return self.idle_s(env_id) <= GONE_AFTER_S

    def forget(self) -> None:
        self._seen_s.clear()


@dataclass(frozen=True, slots=True)
class HubState:
    store: Store
    config: HubConfig
    presence: Presence
    bell: Bell
    porters: Porters
    metrics: Metrics
    board: Board
    terms: LeaseTerms
    limits: Limits
    # Acknowledgements of batches whose answer has left, on their way to the disk.
    settling: set[asyncio.Future[None]] = field(default_factory=set)
    # Two environments of one name that register at once must not both be taken for the one that was here.
    registering: asyncio.Lock = field(default_factory=asyncio.Lock)

    @classmethod
    def build(cls, store: Store, config: HubConfig, clock: Clock) -> HubState:
        presence = Presence(clock)
        terms = LeaseTerms(
            lease_s=config.lease_s,
            max_deliveries=config.max_deliveries,
            plan=plan,
            is_alive=presence.is_alive,
            drop_older_than=config.max_age if config.stale == "drop" else None,
        )
        return cls(
            store=store,
            config=config,
            presence=presence,
            bell=Bell(),
            porters=Porters(config.door_workers or max(1, min(MOST_PORTERS, (os.cpu_count() or 2) - 1))),
            metrics=Metrics(),
            board=Board(clock),
            terms=terms,
            limits=Limits(groups=config.queue_limit_groups, bytes=config.queue_limit_bytes),
        )

    @property
    def full_weight_age(self) -> int | None:
        """Older groups than this count less; None: all count in full, or are dropped before."""
        return self.config.max_age if self.config.stale == "downweight" else None

    def is_run_at_work(self) -> bool:
        """Whether anybody is heard of: a process that reports, an environment that calls, a trainer that asks."""
        reports = any(standing.heard_s <= GONE_AFTER_S for standing in self.board.standings())
        return reports or self.presence.is_anybody_here or self.bell.somebody_waits

    async def settled(self) -> None:
        """To be awaited before the step is told: who has a batch in hand must not hear that it was not given out."""
        if self.settling:
            await asyncio.wait(self.settling, timeout=SETTLE_S)

    def rules(self) -> Rules:
        """What groups that arrive now must agree with."""
        run, num_envs, newest_step = self.store.door_facts()
        trainer, needs_version = run.trainer, self.config.unversioned == "refuse"
        if trainer is None:
            return Rules(
                num_envs=num_envs,
                vocab_size=self.config.vocab_size,
                newest_version=newest_step,
                needs_version=needs_version,
            )
        return Rules(
            num_envs=num_envs,
            vocab_size=self.config.vocab_size or trainer.vocab_size,
            max_token_len=trainer.max_token_len if trainer.max_token_len > 0 else None,
            batch_size=trainer.batch_size if trainer.batch_size > 0 else None,
            newest_version=newest_step,
            needs_version=needs_version,
        )
