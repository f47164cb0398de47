"""What completions are worth: by an environment's rewards in their workers, or by its own `score`."""

from __future__ import annotations

import math
from collections.abc import Sequence

from treadle.envs.base import Environment, Item, Score
from treadle.envs.engine_client import Completion
from treadle.envs.rewards import Reward, RewardInput, RewardResult, Scorer, registry
from treadle.log import get_logger

log = get_logger("env")


class Judge:
    """`await judge.scores(item, completions)`: one score for each, also where its code fails."""

    def __init__(self, environment: Environment, scorer: Scorer) -> None:
        self._environment = environment
        self._scorer = scorer
        self._reward: Reward | None = None
        if environment.rewards:
            self._reward = registry.create(environment.rewards)

    async def scores(self, item: Item, completions: Sequence[Completion]) -> list[Score]:
        if self._reward is None:
            return [score_here(self._environment, item, completion) for completion in completions]
        results = await self._scorer.score(self._reward, [as_reward_input(item, c) for c in completions])
        return [self._as_score(result) for result in results]

    def _as_score(self, result: RewardResult) -> Score:
        return Score(
            reward=result.score,
            is_right=result.score is not None and self._environment.is_right(result),
            parts={name: worth for name, worth in result.parts.items() if worth is not None},
            outcome=result.outcome,
            error=result.detail,
        )


def as_reward_input(item: Item, completion: Completion) -> RewardInput:
    return RewardInput(
        text=completion.text,
        answer=item.answer,
        prompt=item.prompt,
        num_tokens=len(completion.token_ids),
        finish_reason=completion.finish_reason,
        metadata=dict(item.metadata),
    )


def score_here(environment: Environment, item: Item, completion: Completion) -> Score:
    """By the environment's own method; an error in its code marks this completion, not the run."""
    try:
        return as_score(environment.score(item, completion.text, completion))
    except Exception as error:  # the border to code that a user writes
        log.error("score_failed", exc_info=True, prompt=item.prompt, completion=completion.text)
        return failed(error)


def as_score(given: Score | float) -> Score:
    """A plain number is right when it is above nothing. Not a finite number: ValueError, unless the score says why."""
    score = given if isinstance(given, Score) else Score(reward=float(given), is_right=given > 0)
    if score.reward is None and score.outcome != "scored":
        return score
    if score.reward is None or not math.isfinite(score.reward):
        raise ValueError(f"the reward is {score.reward}")
    return score


def failed(error: Exception) -> Score:
    return Score(reward=None, is_right=False, outcome="raised", error=f"{type(error).__name__}: {error}")
