r"""A gold answer written the way its rewards look for it: in a box, behind some thinking."""

from __future__ import annotations

from collections.abc import Sequence

from treadle.envs.rewards import BoxedMath, CosineScaledReward, Reward, RewardLike, ThinkFormatReward, registry
from treadle.envs.rewards.combined import leaves

Rewards = RewardLike | Sequence[RewardLike]


def written_for(rewards: Rewards, answer: str) -> str:
    r"""`written_for(["boxed_math"], "7") == "\\boxed{7}"`; other rewards take the answer as it is."""
    text = f"\\boxed{{{answer}}}" if wants_box(rewards) else answer
    thinks = any(isinstance(part, ThinkFormatReward) for part in _parts(rewards))
    return f"<think>The reasoning stands here.</think>\n{text}" if thinks else text


def wants_box(rewards: Rewards) -> bool:
    return any(isinstance(part, BoxedMath) for part in _parts(rewards))


def _parts(rewards: Rewards) -> list[Reward]:
    if not rewards:
        return []
    parts = leaves(registry.create(rewards))
    inner = [registry.create(part.of) for part in parts if isinstance(part, CosineScaledReward)]
    return [*parts, *(leaf for reward in inner for leaf in leaves(reward))]
