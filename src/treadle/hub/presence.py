"""Which environments are alive, and how they share a batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Self

from treadle.store import EnvRecord

GONE_AFTER_S = 10.0  # environments call several times a second; one silent for this long is taken to be gone
PRESENT_FOR_S = 0.25  # how long it is taken for granted which environments are present


@dataclass(frozen=True, slots=True)
class PresentEnvs:
    """The environments that were connected and alive at a moment, and how they share a batch."""

    envs: Mapping[int, EnvRecord]
    total_minimum: float
    total_weight: float

    @classmethod
    def of(cls, envs: Iterable[EnvRecord]) -> Self:
        by_id = {env.env_id: env for env in envs}
        return cls(by_id, sum(map(_minimum, by_id.values())), sum(map(_weight, by_id.values())))

    def and_also(self, env: EnvRecord) -> PresentEnvs:
        return PresentEnvs(
            {**self.envs, env.env_id: env}, self.total_minimum + _minimum(env), self.total_weight + _weight(env)
        )

    def batch_share(self, env_id: int) -> float:
        """The share of a batch that is to come from an environment: its minimum, and of the rest what its weight gives.

        The shares of all that are present are 1 together.
        """
        env = self.envs[env_id]
        by_weight = _weight(env) / self.total_weight if self.total_weight > 0 else 1 / len(self.envs)
        return _minimum(env) / max(1.0, self.total_minimum) + max(0.0, 1.0 - self.total_minimum) * by_weight


def _minimum(env: EnvRecord) -> float:
    return min(1.0, max(0.0, env.min_batch_allocation or 0.0))


def _weight(env: EnvRecord) -> float:
    return max(0.0, env.weight) if math.isfinite(env.weight) else 0.0


class Presence:
    """Last call of each environment. In memory: after a restart each has a full period again, and so has one that this
    hub has not heard of, because it registered at another hub."""

    def __init__(
        self,
        clock: Callable[[], float],
        read_envs: Callable[[], list[EnvRecord]],
        read_env: Callable[[int], EnvRecord | None],
        known: Iterable[int] = (),
    ) -> None:
        """`known`: the ids that were registered before this hub started."""
        self._clock = clock
        self._read_envs = read_envs
        self._read_env = read_env
        self._known_since_s = dict.fromkeys(known, clock())
        self._seen_s: dict[int, float] = {}
        self._present: PresentEnvs | None = None
        self._present_at_s = -math.inf

    def mark(self, env_id: int, idle_s: float = 0.0) -> None:
        """It has called, here or (`idle_s` ago) at another hub on the same database."""
        self._seen_s[env_id] = max(self._seen_s.get(env_id, -math.inf), self._clock() - idle_s)

    def seen_here_s(self) -> dict[int, float]:
        """Seconds since the last call of each environment."""
        return {env_id: self._clock() - seen_s for env_id, seen_s in list(self._seen_s.items())}

    def idle_s(self, env_id: int) -> float:
        seen_s = self._seen_s.get(env_id)
        if seen_s is None:
            seen_s = self._known_since_s.setdefault(env_id, self._clock())
        return self._clock() - seen_s

    @property
    def is_anybody_here(self) -> bool:
        """Whether any environment has called recently."""
        return any(self._clock() - seen_s <= GONE_AFTER_S for seen_s in list(self._seen_s.values()))

    @property
    def num_present(self) -> int:
        """Environments that have called recently."""
        now_s = self._clock()
        return sum(now_s - seen_s <= GONE_AFTER_S for seen_s in list(self._seen_s.values()))

    def is_alive(self, env_id: int) -> bool:
        return self.idle_s(env_id) <= GONE_AFTER_S

    def others_with(self, env_id: int) -> PresentEnvs | None:
        """Those that are present, with one that asks now; None if it is not registered.

        Every environment asks several times per second, so they are read again only after PRESENT_FOR_S. One that was
        not present is read alone: after a restart of the hub that is each of them.
        """
        present, is_new = self._present, self._clock() - self._present_at_s <= PRESENT_FOR_S
        if present is not None and is_new:
            if env_id not in present.envs:
                env = self._read_env(env_id)
                if env is None:
                    return None
                present = self._present = present.and_also(env)
            return present
        envs = self._read_envs()
        if all(env.env_id != env_id for env in envs):
            return None
        self._present = PresentEnvs.of(
            env for env in envs if env.env_id == env_id or (env.connected and self.is_alive(env.env_id))
        )
        self._present_at_s = self._clock()
        return self._present

    def registrations_changed(self) -> None:
        self._present = None

    def forget(self) -> None:
        self._seen_s.clear()
        self._known_since_s.clear()
        self.registrations_changed()
