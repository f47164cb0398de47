"""Rewards that follow another one, scaled by the completion's length."""

from __future__ import annotations

import functools
import math
from typing import Any

from treadle.envs.rewards.base import Judged, Reward, RewardInput, judged
from treadle.envs.rewards.registry import registry
from treadle.errors import ConfigError


class CosineScaledReward(Reward):
    """Right answers are worth more the shorter they are, wrong ones cost less the longer they are.

    Between 0 and `max_tokens` the worth follows half a cosine wave. Right is what the reward `of` calls correct; where
    it gives no verdict, what it scores above 0.

    >>> brief = CosineScaledReward(of="exact_match", max_tokens=100)
    >>> [round(brief.score(RewardInput("4", answer="4", num_tokens=n)), 3) for n in (0, 50, 100)]
    [1.0, 0.75, 0.5]
    """

    of: str | dict[str, Any] = "boxed_math"
    max_tokens: int = 2048
    right_short: float = 1.0
    right_long: float = 0.5
    wrong_short: float = -1.0
    wrong_long: float = -0.5

    def check(self) -> None:
        if self.max_tokens < 1:
            raise ConfigError(f"reward '{self.name}' has max_tokens {self.max_tokens}", fix="give 1 or more")
        if self._judge.looks_at_groups:
            raise ConfigError(f"reward '{self.name}' cannot follow one that looks at groups", fix="choose another 'of'")

    def check_installed(self) -> None:
        self._judge.check_installed()

    def warm_up(self) -> None:
        self._judge.warm_up()

    def score(self, completion: RewardInput) -> float:
        said = judged(self._judge.score(completion))
        correct = said > 0 if said.correct is None else said.correct
        short, long = (self.right_short, self.right_long) if correct else (self.wrong_short, self.wrong_long)
        progress = min(1.0, completion.length / self.max_tokens)
        return Judged(long + (short - long) * (1 + math.cos(math.pi * progress)) / 2, correct=correct)

    @functools.cached_property
    def _judge(self) -> Reward:
        return registry.create(self.of)
