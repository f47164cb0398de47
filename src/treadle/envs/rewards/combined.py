"""Rewards made of other rewards: weighted sums and scaling by length; and the answer format that rewards expect."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self

import msgspec

from treadle.envs.rewards.base import CallResult, Judged, Reward, RewardInput, RewardResult, judged
from treadle.envs.rewards.registry import RewardLike, registry
from treadle.envs.rewards.services import ServiceReward
from treadle.envs.rewards.text import AccuracyReward, BoxedMath, ThinkFormatReward
from treadle.errors import ConfigError

NOT_APPLICABLE = CallResult(outcome="raised", detail="returned None (not applicable), as did all others that count")
Rewards = RewardLike | Sequence[RewardLike]


class CombinedReward(Reward):
    """The weighted sum of rewards. A part with weight 0 is only recorded; its failure does not fail the completion.

    `normalization`: "none" leaves the sum as it is; "sum" divides it by the sum of the weights; "minmax" scales it
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
        raw = {leaf.name: [_value_of(leaf, value) for value in leaf.score_group(group)] for leaf in leaves(self)}
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
    """Settings of a combination, besides its parts."""

    weight: float = 1.0
    name: str = ""
    normalization: Literal["none", "sum", "minmax"] = "none"


class R1Reward(CombinedReward):
    """1 for the right answer and 0.5 for the think format."""

    rewards: tuple[Reward, ...] = (AccuracyReward(), ThinkFormatReward(weight=0.5))


def leaves(reward: Reward) -> list[Reward]:
    """The rewards that are actually called, in order."""
    if isinstance(reward, CombinedReward):
        return [leaf for part in reward.rewards for leaf in leaves(part)]
    return [reward]


def combine(reward: Reward, raw: Mapping[str, Sequence[float | None]]) -> list[float | None]:
    """Combine the scores of the leaves, by name, into one score per completion, before the reward's own weight.

    None: a part with a weight could not score the completion, so it has no score. NaN: the part is not applicable and
    adds nothing; the result is NaN if no part applies.
    """
    if not isinstance(reward, CombinedReward):
        return list(raw[reward.name])
    counting = [part for part in reward.rewards if part.weight != 0]
    columns = [combine(part, raw) for part in counting]
    num_completions = max((len(column) for column in raw.values()), default=0)
    rows = zip(*columns, strict=True) if columns else [()] * num_completions  # all parts may be only recorded
    return _normalized([_weighted_sum(counting, row) for row in rows], reward)


def assemble(reward: Reward, calls: Mapping[str, Sequence[tuple[CallResult, Judged | None]]]) -> list[RewardResult]:
    """Combine the calls of all leaves into one result per completion.

    A part that is not applicable adds nothing; a completion to which no part with a weight is applicable has no score.
    """
    parts = {name: [None if score is None else float(score) for _, score in column] for name, column in calls.items()}
    # A successful call without a score for a completion: the reward is not applicable to it.
    raw = {
        name: [_or_nan(score) if call.outcome == "scored" else score for call, score in column]
        for name, column in calls.items()
    }
    counts = _counting_names(reward)
    results = []
    for index, combined in enumerate(combine(reward, raw)):
        found = {name: column[index] for name, column in calls.items()}
        failures = [(name, call) for name, (call, _) in found.items() if call.outcome != "scored"]
        given = [score for _, score in found.values() if score is not None]
        if combined is not None and math.isnan(combined):
            failures += [(name, NOT_APPLICABLE) for name in found if name in counts]
        blamed = next((call for name, call in failures if name in counts), None)
        results.append(
            RewardResult(
                score=None if combined is None or blamed else reward.weight * combined,
                parts={name: column[index] for name, column in parts.items()},
                correct=next((score.correct for score in given if score.correct is not None), None),
                outcome=blamed.outcome if blamed else "scored",
                detail="; ".join(f"{name}: {call.detail}" for name, call in failures),
                seconds=sum(call.seconds for call, _ in found.values()),
                metrics={f"{n}/{metric}": v for n, (call, _) in found.items() for metric, v in call.metrics.items()},
            )
        )
    return results


def _counting_names(reward: Reward) -> set[str]:
    if not isinstance(reward, CombinedReward):
        return {reward.name}
    return {name for part in reward.rewards if part.weight != 0 for name in _counting_names(part)}


def _or_nan(score: float | None) -> float:
    return math.nan if score is None else score


def _value_of(leaf: Reward, value: Any) -> float:
    """The value that a leaf gave when it was called directly; NaN: not applicable."""
    score = leaf.judged(value)
    if score is None and leaf.meaning_of_none is not None:
        raise ValueError(f"reward '{leaf.name}' has no score: {leaf.meaning_of_none.detail}")
    return _or_nan(score)


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


class CosineScaledReward(Reward):
    """Another reward, scaled by length: right answers score more if short, wrong ones cost less if long.

    Between 0 and `max_tokens` the score follows half a cosine wave. An answer is right if the reward `of` calls it
    correct or, without a verdict, scores it above 0.

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
        if self._inner.looks_at_groups:
            raise ConfigError(f"reward '{self.name}' cannot follow one that looks at groups", fix="choose another 'of'")
        if isinstance(self._inner, ServiceReward):
            raise ConfigError(f"reward '{self.name}' cannot follow one that asks a server", fix="choose another 'of'")

    def check_installed(self) -> None:
        self._inner.check_installed()

    def warm_up(self) -> None:
        self._inner.warm_up()

    def score(self, completion: RewardInput) -> float:
        said = judged(self._inner.score(completion))
        correct = said > 0 if said.correct is None else said.correct
        short, long = (self.right_short, self.right_long) if correct else (self.wrong_short, self.wrong_long)
        progress = min(1.0, completion.length / self.max_tokens)
        return Judged(long + (short - long) * (1 + math.cos(math.pi * progress)) / 2, correct=correct)

    @functools.cached_property
    def _inner(self) -> Reward:
        return registry.create(self.of)


def format_gold_answer(rewards: Rewards, answer: str) -> str:
    r"""`format_gold_answer(["boxed_math"], "7") == "\\boxed{7}"`; other rewards take the answer as it is."""
    text = f"\\boxed{{{answer}}}" if expects_box(rewards) else answer
    thinks = any(isinstance(part, ThinkFormatReward) for part in _parts(rewards))
    return f"<think>The reasoning stands here.</think>\n{text}" if thinks else text


def expects_box(rewards: Rewards) -> bool:
    return any(isinstance(part, BoxedMath) for part in _parts(rewards))


def _parts(rewards: Rewards) -> list[Reward]:
    if not rewards:
        return []
    parts = leaves(registry.create(rewards))
    inner = [registry.create(part.of) for part in parts if isinstance(part, CosineScaledReward)]
    return [*parts, *(leaf for reward in inner for leaf in leaves(reward))]
