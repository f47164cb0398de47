"""What the rollouts of one item are worth beside each other. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from treadle.envs.rollout import Rollout


def with_length_penalty(rollouts: Sequence[Rollout], max_tokens: int) -> list[Rollout]:
    """When all are right, the short ones are worth more; a group with a wrong one stays as it is.

    The whole reward up to half of `max_tokens` sampled tokens, then less in a straight line, and nothing at
    `max_tokens`. Rollouts that could not be scored have no say.
    """
    scored = [rollout for rollout in rollouts if rollout.score.reward is not None]
    if not scored or not all(rollout.score.is_right for rollout in scored):
        return list(rollouts)
    return [_scaled(rollout, length_share(rollout.num_sampled, max_tokens)) for rollout in rollouts]


def length_share(num_tokens: int, max_tokens: int) -> float:
    """`length_share(768, 1024) == 0.5`."""
    return min(1.0, max(0.0, 2 * (1 - num_tokens / max_tokens)))


def without_short(rollouts: Sequence[Rollout], min_tokens: int) -> list[Rollout]:
    """Rollouts of fewer sampled tokens have no score: they stay in the group, so that its size is right, unlearned."""
    return [
        rollout if rollout.num_sampled >= min_tokens else _unscored(rollout, f"fewer than {min_tokens} sampled tokens")
        for rollout in rollouts
    ]


def _scaled(rollout: Rollout, share: float) -> Rollout:
    reward = rollout.score.reward
    if reward is None:
        return rollout
    # A reward below nothing is not made better by length.
    return replace(rollout, score=replace(rollout.score, reward=min(reward, reward * share)))


def _unscored(rollout: Rollout, why: str) -> Rollout:
    if rollout.score.reward is None:
        return rollout  # it says already why
    return replace(rollout, score=replace(rollout.score, reward=None, outcome="too_short", error=why))
