"""Turn the rollouts of one item into a group to send: adjust scores, decide whether to drop it, build it. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

from treadle.envs.base import Environment
from treadle.envs.chat import Transcript
from treadle.envs.rollout import Rollout
from treadle.wire.groups import ScoredGroup

# How the scores of a group compare. "all_right", "all_wrong" and "equal": they are all the same, and teach nothing.
Scores = Literal["differ", "all_right", "all_wrong", "equal", "none"]


def with_length_penalty(rollouts: Sequence[Rollout], max_tokens: int) -> list[Rollout]:
    """If all rollouts are right, scale their rewards down with length; a group with a wrong one is not changed.

    The factor is 1 up to half of `max_tokens` sampled tokens, then decreases linearly to 0 at `max_tokens`. Unscored
    rollouts are ignored.
    """
    scored = [rollout for rollout in rollouts if rollout.score.reward is not None]
    if not scored or not all(rollout.score.is_right for rollout in scored):
        return list(rollouts)
    return [_scaled(rollout, length_share(rollout.num_sampled, max_tokens)) for rollout in rollouts]


def length_share(num_tokens: int, max_tokens: int) -> float:
    """`length_share(768, 1024) == 0.5`."""
    return min(1.0, max(0.0, 2 * (1 - num_tokens / max_tokens)))


def without_short(rollouts: Sequence[Rollout], min_tokens: int) -> list[Rollout]:
    """Remove the scores of rollouts with fewer sampled tokens; they stay in the group to keep its size."""
    return [
        rollout if rollout.num_sampled >= min_tokens else _unscored(rollout, f"fewer than {min_tokens} sampled tokens")
        for rollout in rollouts
    ]


def _scaled(rollout: Rollout, share: float) -> Rollout:
    reward = rollout.score.reward
    if reward is None:
        return rollout
    # A negative reward must not improve with length.
    return replace(rollout, score=replace(rollout.score, reward=min(reward, reward * share)))


def _unscored(rollout: Rollout, why: str) -> Rollout:
    if rollout.score.reward is None:
        return rollout  # it already has a reason
    return replace(rollout, score=replace(rollout.score, reward=None, outcome="too_short", error=why))


def apply_group_rules(environment: Environment, rollouts: Sequence[Rollout]) -> list[Rollout]:
    """Apply the environment's minimum length and length penalty."""
    adjusted = without_short(rollouts, environment.min_trained_tokens)
    config = environment.config
    return with_length_penalty(adjusted, config.max_token_length) if config.length_penalty else adjusted


def drop_reason(rollouts: Sequence[Rollout], *, drop_equal_scores: bool) -> str | None:
    """Why a group is not worth sending: "unscored", "nothing_sampled" or "equal_scores"; None: send it."""
    sampled = [rollout for rollout in rollouts if rollout.num_sampled]
    if not sampled:
        return "nothing_sampled"
    scores = compare_scores(sampled)
    if scores == "none":
        return "unscored"
    return "equal_scores" if drop_equal_scores and scores != "differ" else None


def compare_scores(rollouts: Sequence[Rollout]) -> Scores:
    """ "equal": the same score, but neither all right nor all wrong."""
    scored = [rollout.score for rollout in rollouts if rollout.num_sampled and rollout.score.reward is not None]
    if not scored:
        return "none"
    if len({score.reward for score in scored}) > 1:
        return "differ"
    if all(score.is_right for score in scored):
        return "all_right"
    return "equal" if any(score.is_right for score in scored) else "all_wrong"


def build_group(rollouts: Sequence[Rollout], *, temperature: float) -> ScoredGroup:
    """Every transcript becomes a sequence with its rollout's score.

    An unscored rollout stays in the group to keep its size, but is not trained on: it gets the mean of the others,
    which leaves the group's mean unchanged, and its advantage is set to zero.
    """
    scored = [rollout.score.reward for rollout in rollouts if rollout.score.reward is not None]
    mean = sum(scored) / len(scored) if scored else 0.0  # a wave keeps groups without scores
    pairs = [(rollout, transcript) for rollout in rollouts for transcript in rollout.transcripts]
    overrides = [_overrides(rollout, transcript) for rollout, transcript in pairs]
    return ScoredGroup(
        tokens=[transcript.tokens for _, transcript in pairs],
        masks=[transcript.masks for _, transcript in pairs],
        scores=[mean if rollout.score.reward is None else rollout.score.reward for rollout, _ in pairs],
        inference_logprobs=[transcript.logprobs for _, transcript in pairs],
        messages=[transcript.messages for _, transcript in pairs],
        generation_params={"temperature": temperature},
        overrides=overrides if any(overrides) else None,
        policy_version=min(version for _, transcript in pairs for version in transcript.policy_versions),
        metrics=_metrics(rollouts),
    )


def _overrides(rollout: Rollout, transcript: Transcript) -> dict[str, Any]:
    """Per-sequence data for the trainer (truncation, temperature, zero advantage) and for display."""
    found: dict[str, Any] = {"finish_reason": "length"} if transcript.finish_reason == "length" else {}
    if rollout.score.parts:
        found |= {"parts": dict(rollout.score.parts), "outcome": rollout.score.outcome}
    if len(set(transcript.policy_versions)) > 1:
        found["policy_versions"] = sorted(set(transcript.policy_versions))
    if transcript.temperature is not None:
        found["temperature"] = transcript.temperature
    if rollout.score.reward is None:
        found |= {"set_advantage_to_zero": True, "outcome": rollout.score.outcome, "error": rollout.score.error}
    return found


def _metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    count = len(rollouts)
    metrics = {
        "accuracy": sum(rollout.score.is_right for rollout in rollouts) / count,
        "generation_s": max(rollout.seconds for rollout in rollouts),  # they are generated concurrently
        "score_s": sum(rollout.score.seconds for rollout in rollouts),
        "generated_tokens": float(sum(rollout.num_sampled for rollout in rollouts)),
        "truncated": sum(rollout.is_truncated for rollout in rollouts) / count,
    }
    for name in sorted({name for rollout in rollouts for name in rollout.score.parts}):
        worths = [rollout.score.parts[name] for rollout in rollouts if name in rollout.score.parts]
        metrics[f"reward/{name}"] = sum(worths) / len(worths)
    failures = Counter(rollout.score.outcome for rollout in rollouts if rollout.score.reward is None)
    for outcome, times in failures.items():
        metrics[f"score_{outcome}"] = float(times)
    num_errors = failures.total() - failures["too_short"]
    if num_errors:
        metrics["score_errors"] = float(num_errors)
    return metrics
