"""Rewards: score completions.

from treadle.envs.rewards import RewardInput, RewardPool, registry, reward

@reward
def is_polite(completion: RewardInput) -> float:
    return "please" in completion.text.lower()

wanted = registry.create([{"type": "boxed_math"}, {"type": "think_format", "weight": 0.2}, is_polite])
async with RewardPool(num_workers=2, time_limit_s=10) as pool:
    results = await pool.score(wanted, completions)
"""

from __future__ import annotations

from treadle.envs.rewards.base import (
    BatchFunctionReward,
    FunctionReward,
    Judged,
    Outcome,
    Reward,
    RewardInput,
    RewardResult,
)
from treadle.envs.rewards.combined import CombinedReward, CosineScaledReward, R1Reward
from treadle.envs.rewards.registry import Registry, RewardLike, registry, reward
from treadle.envs.rewards.scorers import InlineScorer, Isolation, RewardPool, Scorer, make_scorer
from treadle.envs.rewards.text import (
    AccuracyReward,
    BoxedMath,
    ExactMatchReward,
    FormatReward,
    JsonSchemaReward,
    LengthReward,
    ReasoningStepsReward,
    RegexReward,
    RepetitionPenaltyReward,
    ThinkFormatReward,
)

__all__ = [
    "AccuracyReward",
    "BatchFunctionReward",
    "BoxedMath",
    "CombinedReward",
    "CosineScaledReward",
    "ExactMatchReward",
    "FormatReward",
    "FunctionReward",
    "InlineScorer",
    "Isolation",
    "JsonSchemaReward",
    "Judged",
    "LengthReward",
    "Outcome",
    "R1Reward",
    "ReasoningStepsReward",
    "RegexReward",
    "Registry",
    "RepetitionPenaltyReward",
    "Reward",
    "RewardInput",
    "RewardLike",
    "RewardPool",
    "RewardResult",
    "Scorer",
    "ThinkFormatReward",
    "make_scorer",
    "registry",
    "reward",
]
