"""How completions are scored: in workers that can be killed, or right here."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Literal, Protocol, Self

from treadle.envs.rewards.base import Reward, RewardInput
from treadle.envs.rewards.calls import calls_for, judge, per_completion
from treadle.envs.rewards.combined import assemble, leaves
from treadle.envs.rewards.outcome import RewardResult
from treadle.envs.rewards.pool import RewardPool

Isolation = Literal["process", "inline"]
TURN_S = 0.01  # then the event loop gets its turn


class Scorer(Protocol):
    """What an environment needs: opened with `async with`, then asked from any number of tasks."""

    async def __aenter__(self) -> Self: ...
    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
    async def score(self, reward: Reward, inputs: Sequence[RewardInput]) -> list[RewardResult]: ...


def make_scorer(isolation: Isolation = "process", **limits: Any) -> Scorer:
    """`make_scorer("process", num_workers=4, time_limit_s=5)`, or `make_scorer("inline")`, which knows no limits."""
    return RewardPool(**limits) if isolation == "process" else InlineScorer()


class InlineScorer:
    """In this process, for rewards that are known to be quick and harmless. Nothing can be ended or limited."""

    def __init__(self) -> None:
        self._warm: list[Reward] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    async def score(self, reward: Reward, inputs: Sequence[RewardInput]) -> list[RewardResult]:
        turn_ends = time.monotonic() + TURN_S
        calls = {}
        for leaf in leaves(reward):
            if leaf not in self._warm:
                leaf.warm_up()
                self._warm.append(leaf)
            column = []
            for call in calls_for(leaf, inputs):
                column.append(judge(leaf, call))
                if time.monotonic() > turn_ends:
                    await asyncio.sleep(0)
                    turn_ends = time.monotonic() + TURN_S
            calls[leaf.name] = per_completion(leaf, column, len(inputs))
        return assemble(reward, calls)
