"""Rewards that ask a server: coroutines in the process of the environment, with state shared by all of its rollouts.

    class MyReward(ServiceReward):              settings, sent and saved like those of any reward
        def open_service(self, state_folder): ...   its RewardService: connections, budget, cache

Such a reward waits for a network, so a worker process for each call would only limit how many calls wait at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Protocol

import msgspec

from treadle.envs.rewards.base import CallResult, Reward, RewardInput
from treadle.errors import ConfigError


class RewardService(Protocol):
    async def score(self, group: Sequence[RewardInput]) -> list[CallResult]:
        """A result for each completion of a group, in order."""

    async def close(self) -> None: ...


class ServiceReward(Reward):
    """Base class of rewards that ask a server. A RewardPool or an InlineScorer opens them when they are first used."""

    may_abstain: ClassVar = True

    def open_service(self, state_folder: Path | None) -> RewardService:
        """Its service; `state_folder`: for what outlives the process. Connects to nothing yet."""
        raise NotImplementedError(f"{type(self).__name__} needs a method open_service")

    def score(self, completion: RewardInput) -> float:
        raise ConfigError(
            f"reward '{self.name}' asks a server, so it cannot be called directly",
            fix="async with RewardPool() as pool: await pool.score(reward, [completion])",
        )


class RewardServices:
    """The open services of one scorer, one for each reward."""

    def __init__(self) -> None:
        self.state_folder: Path | None = None  # of the run; set before the first use
        self._open: dict[bytes, RewardService] = {}  # by the reward's configuration

    async def score(self, reward: ServiceReward, inputs: Sequence[RewardInput]) -> list[CallResult]:
        if not inputs:
            return []
        key = msgspec.msgpack.encode(reward.to_config())
        if key not in self._open:
            self._open[key] = reward.open_service(self.state_folder)
        return await self._open[key].score(inputs)

    async def close(self) -> None:
        services, self._open = list(self._open.values()), {}
        for service in services:
            await service.close()
