"""Several rewards as one score."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self

import msgspec

from treadle.envs.rewards.base import Judged, Reward, RewardInput
from treadle.envs.rewards.boxed_math import AccuracyReward
from treadle.envs.rewards.outcome import CallResult, RewardResult
from treadle.envs.rewards.registry import registry
from treadle.envs.rewards.shape import ThinkFormatReward
from treadle.errors import ConfigError

NOT_APPLICABLE = CallResult(outcome="raised", detail="returned None (not applicable), as did all others that count")


class CombinedReward(Reward):
    """The weighted sum of rewards. A weight of 0 only records: that part neither counts nor can fail the completion.

    `normalization`: "none" leaves the sum as it is; "sum" divides it by the sum of the weights; "minmax" stretches it
    over the group from 0 (the worst) to 1 (the best), and is 0 for all of a group without differences.
    """

    rewards: tuple[Reward, ...] = ()
    normalization: Literal["none", "sum", "minmax"] = "none"

    def check(self) -> None:
        if not self.rewards:
            raise ConfigError(f"reward '{self.name}' combines nothing", fix="list at least one under 'rewards'")
        for name, count in Counter(leaf.name for leaf in leaves(self)).items():
            if count > 1:
                raise ConfigError(f"two rewards in '{self.name}' are called '{name}'", fix="give one another 'name'")
        if self.normalization == "sum" and self.total_weight <= 0:
            raise ConfigError(
                f"reward '{self.name}' cannot divide by the sum of its weights, which is {self.total_weight:g}",
                fix="make the sum positive, or choose another normalization",
            )

    def check_installed(self) -> None:
        for part in self.rewards:
            part.check_installed()

    @property
    def total_weight(self) -> float:
        return sum(part.weight for part in self.rewards)

    @property
    def looks_at_groups(self) -> bool:
        return self.normalization == "minmax" or any(part.looks_at_groups for part in self.rewards)

    def score(self, completion: RewardInput) -> float:
        return self.score_group([completion])[0]

    def score_group(self, group: Sequence[RewardInput]) -> Sequence[float]:
        raw = {leaf.name: [_or_nan(leaf.judged(value)) for value in leaf.score_group(group)] for leaf in leaves(self)}
        combined = [score for score in combine(self, raw) if score is not None]  # none is: all parts are there
        return [0.0 if math.isnan(score) else score for score in combined]

    @property
    def settings(self) -> dict[str, Any]:
        return {"rewards": [part.to_config() for part in self.rewards], "normalization": self.normalization}

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> Self:
        rest = {key: value for key, value in settings.items() if key != "rewards"}
        made = msgspec.convert(rest, _Settings)
        rewards = settings.get("rewards")
        parts = cls().rewards if rewards is None and cls is not CombinedReward else map(registry.create, rewards or ())
        return cls(rewards=tuple(parts), **msgspec.structs.asdict(made))


class _Settings(msgspec.Struct, forbid_unknown_fields=True):
    """What a combination has beside its parts."""

    weight: float = 1.0
    name: str = ""
    normalization: Literal["none", "sum", "minmax"] = "none"


class R1Reward(CombinedReward):
    """1 for the right answer and half as much for thinking first."""

    rewards: tuple[Reward, ...] = (AccuracyReward(), ThinkFormatReward(weight=0.5))


def leaves(reward: Reward) -> list[Reward]:
    """The rewards that are really called, in order."""
    if isinstance(reward, CombinedReward):
        return [leaf for part in reward.rewards for leaf in leaves(part)]
    return [reward]


def combine(reward: Reward, raw: Mapping[str, Sequence[float | None]]) -> list[float | None]:
    """Scores of the leaves by name -> the combined score of each completion, before the reward's own weight.

    None goes through: a completion that a part with a weight could not score has no score. NaN: not applicable; such a
    part adds nothing, and the result is NaN where no part applies.
    """
    if not isinstance(reward, CombinedReward):
        return list(raw[reward.name])
    counting = [part for part in reward.rewards if part.weight != 0]
    columns = [combine(part, raw) for part in counting]
    num_completions = max((len(column) for column in raw.values()), default=0)
    rows = zip(*columns, strict=True) if columns else [()] * num_completions  # all parts may be only recorded
    return _normalized([_weighted_sum(counting, row) for row in rows], reward)


def assemble(reward: Reward, calls: Mapping[str, Sequence[tuple[CallResult, Judged | None]]]) -> list[RewardResult]:
    """What the calls of each leaf gave for each completion -> one result for each completion.

    A part that is not applicable adds nothing; a completion to which no part with a weight is applicable has no score.
    """
    parts = {name: [None if score is None else float(score) for _, score in column] for name, column in calls.items()}
    # A call that went well and has no score for a completion: the reward is not applicable to it.
    raw = {
        name: [_or_nan(score) if call.outcome == "scored" else score for call, score in column]
        for name, column in calls.items()
    }
    counts = _counting_names(reward)
    results = []
    for place, combined in enumerate(combine(reward, raw)):
        found = {name: column[place] for name, column in calls.items()}
        failures = [(name, call) for name, (call, _) in found.items() if call.outcome != "scored"]
        given = [score for _, score in found.values() if score is not None]
        if combined is not None and math.isnan(combined):
            failures += [(name, NOT_APPLICABLE) for name in found if name in counts]
        blamed = next((call for name, call in failures if name in counts), None)
        results.append(
            RewardResult(
                score=None if combined is None or blamed else reward.weight * combined,
                parts={name: column[place] for name, column in parts.items()},
                correct=next((score.correct for score in given if score.correct is not None), None),
                outcome=blamed.outcome if blamed else "scored",
                detail="; ".join(f"{name}: {call.detail}" for name, call in failures),
                seconds=sum(call.seconds for call, _ in found.values()),
            )
        )
    return results


def _counting_names(reward: Reward) -> set[str]:
    if not isinstance(reward, CombinedReward):
        return {reward.name}
    return {name for part in reward.rewards if part.weight != 0 for name in _counting_names(part)}


def _or_nan(score: float | None) -> float:
    return math.nan if score is None else score


def _weighted_sum(parts: Sequence[Reward], row: Sequence[float | None]) -> float | None:
    total, is_applicable = 0.0, not parts
    for part, value in zip(parts, row, strict=True):
        if value is None:
            return None
        if not math.isnan(value):
            total, is_applicable = total + part.weight * value, True
    return total if is_applicable else math.nan


def _normalized(sums: Sequence[float | None], reward: CombinedReward) -> list[float | None]:
    known = [value for value in sums if value is not None and not math.isnan(value)]
    if reward.normalization == "none" or not known:
        return list(sums)
    if reward.normalization == "sum":
        low, span = 0.0, reward.total_weight
    else:
        low, span = min(known), max(known) - min(known)
    return [value if value is None or math.isnan(value) else (value - low) / span if span else 0.0 for value in sums]
