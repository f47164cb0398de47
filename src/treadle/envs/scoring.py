"""Score completions with an environment's rewards in workers, or with its own `score` method."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from treadle.config.env import EnvConfig
from treadle.envs.base import Environment, Item, Score, is_enough
from treadle.envs.engine_client import Completion
from treadle.envs.rewards import (
    Reward,
    RewardInput,
    RewardPool,
    Scorer,
    registry,
)
from treadle.envs.rewards.addresses import describe
from treadle.envs.rewards.combined import leaves
from treadle.errors import ScoringError
from treadle.log import get_logger

log = get_logger("env")

_SHOWN = 200  # characters of a prompt or completion in the log


def reward_pool(config: EnvConfig) -> RewardPool:
    """The reward workers with the configured limits."""
    return RewardPool(
        config.reward_workers, time_limit_s=config.reward_timeout_s, memory_limit_mb=config.reward_memory_mb
    )


class ScoreRules:
    """`await judge.scores(item, completions)`: one score for each; failures become scores without a reward."""

    def __init__(self, environment: Environment, scorer: Scorer) -> None:
        self._environment = environment
        self._scorer = scorer
        self._num_failures: Counter[str] = Counter()
        self._reward: Reward | None = None
        self._num_raised = 0
        self._has_scored = False
        self._reads_messages = False
        if environment.rewards:
            self._reward = registry.create(environment.rewards)
            self._reads_messages = any(leaf.reads_messages for leaf in leaves(self._reward))

    def keep_state_in(self, folder: Path) -> None:
        """Where rewards that ask a server keep what belongs to the run: answers, and what they have spent."""
        self._scorer.services.state_folder = folder

    async def scores(self, item: Item, completions: Sequence[Completion]) -> list[Score]:
        if self._reward is None:
            return [self._score_here(item, completion) for completion in completions]
        in_full = self._reads_messages
        inputs = [
            RewardInput(
                text=completion.text,
                answer=item.answer,
                prompt=item.prompt,
                num_tokens=len(completion.token_ids),
                finish_reason=completion.finish_reason,
                metadata=dict(item.metadata),
                messages=list(item.messages) if in_full else [],
                is_chat=item.is_chat,
                token_ids=completion.token_ids if in_full else [],
            )
            for completion in completions
        ]
        results = await self._scorer.score(self._reward, inputs)
        for result, completion in zip(results, completions, strict=True):
            if result.score is None:
                self._log_failure("score_failed", f"{result.outcome}: {result.detail}", item, completion.text)
        return [
            Score(
                reward=result.score,
                is_right=result.score is not None and self._environment.is_right(result),
                parts={name: worth for name, worth in result.parts.items() if worth is not None},
                outcome=result.outcome,
                error=result.detail,
                seconds=result.seconds,
                metrics=result.metrics,
            )
            for result in results
        ]

    def _score_here(self, item: Item, completion: Completion) -> Score:
        """Score with the environment's own method; an exception marks this completion as failed."""
        began_s = time.perf_counter()
        try:
            given = self._environment.score(item, completion.text, completion)
            score = as_score(given, self._environment.config.right)
        except Exception as error:  # user code
            score = self.failed("score_failed", item, completion.text, error)
        return replace(score, seconds=score.seconds or time.perf_counter() - began_s)  # its own measurement, if any

    def failed(self, event: str, item: Item, said: str, error: BaseException) -> Score:
        """The score of a rollout whose user code raised, which is logged. Call it in the `except` block."""
        self._log_failure(event, f"{type(error).__name__}: {error}", item, said, with_trace=True)
        return Score(reward=None, is_right=False, outcome="raised", error=describe(error))

    def _log_failure(self, event: str, what: str, item: Item, said: str, *, with_trace: bool = False) -> None:
        """Log each kind of failure once in detail, then only its count: failing tasks must not flood the log."""
        self._num_failures[what] += 1
        count = self._num_failures[what]
        if count == 1:
            shown = {"prompt": item.prompt[-_SHOWN:], "completion": said[:_SHOWN]}
            log.error(event, exc_info=with_trace, problem=what, **shown)
        elif count in (10, 100) or count % 1000 == 0:
            log.error(event, problem=what, times=count)

    def require_scores(self, scores: Sequence[Score]) -> None:
        """Raise ScoringError when scoring has failed for a group's worth of answers and has never succeeded.

        Not for environments that wait for external agents, which may connect late.
        """
        self._has_scored = self._has_scored or any(score.reward is not None for score in scores)
        raised = [score for score in scores if score.outcome in ("raised", "judge_failed", "too_long")]
        self._num_raised += len(raised)
        config, may_fail = self._environment.config, self._has_scored or self._environment.waits_for_agents
        if raised and not may_fail and self._num_raised >= max(config.group_size, 2):
            raise none_scored(self._num_raised, raised[0], config)


def none_scored(num_answers: int, example: Score, config: EnvConfig) -> ScoringError:
    fix = f"correct that code; treadle env {config.name} validate tries it without a model"
    if example.outcome == "judge_failed":
        fix = "see whether the judge's server runs, and what its log says; then continue with --resume"
    elif example.outcome == "too_long":
        fix = "lower --env.max-token-length, raise max_length, or choose a reward model that reads longer texts"
    return ScoringError(f"none of {num_answers} answers could be scored: {example.error or example.outcome}", fix=fix)


def as_score(given: Score | float, right: float) -> Score:
    """Validate the score of user code: finite numbers, else ValueError or TypeError.

    A plain number counts as right from `right` on. A reward of None is valid with an outcome other than "scored".
    """
    if isinstance(given, Score):
        score = given
    else:
        reward = _number("reward", given)
        score = Score(reward=reward, is_right=is_enough(reward, right))
    if score.reward is None and score.outcome != "scored":
        return score
    return replace(
        score,
        reward=_number("reward", score.reward),
        is_right=bool(score.is_right),
        parts={str(name): _number(f"part '{name}'", worth) for name, worth in score.parts.items()},
    )


def _number(name: str, value: Any) -> float:
    """Accepts NumPy numbers and bools; refuses text and NaN."""
    if isinstance(value, str | bytes) or value is None or not math.isfinite(value):
        raise ValueError(f"the {name} is {value}")
    return float(value)
