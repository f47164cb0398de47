"""Call a reward and convert whatever the user code does into a result. A failure has no score, not a low one."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Literal

import msgspec

from treadle.envs.rewards.addresses import user_code_location
from treadle.envs.rewards.base import Judged, Reward, RewardInput

Outcome = Literal["scored", "timed_out", "raised", "out_of_memory", "worker_died"]
MAX_DETAIL = 500  # letters; an error may quote a whole completion


class RewardResult(msgspec.Struct, frozen=True, kw_only=True):
    """`score` is None unless `outcome` is "scored"; `parts` has what each reward gave, before weights.

    `correct` is the verdict of the first reward that gives one; None: none does.
    """

    score: float | None
    parts: dict[str, float | None]
    correct: bool | None = None
    outcome: Outcome = "scored"
    detail: str = ""  # of a failure: which reward, and what happened
    seconds: float = 0.0


class CallResult(msgspec.Struct, frozen=True, omit_defaults=True, tag="result"):
    """Result of one call of one reward: a score for each completion, or the failure."""

    scores: list[float | None] = []  # None: the reward is not applicable to that completion
    correct: list[bool | None] = []  # empty: no verdicts
    outcome: Outcome = "scored"
    detail: str = ""
    seconds: float = 0.0


def calls_for(reward: Reward, inputs: Sequence[RewardInput]) -> list[list[RewardInput]]:
    """The inputs of each call: one completion, or the whole group if the reward looks at groups."""
    if reward.looks_at_groups:
        return [list(inputs)] if inputs else []
    return [[completion] for completion in inputs]


def call_reward(reward: Reward, inputs: Sequence[RewardInput]) -> CallResult:
    """Call the reward; exceptions, including SystemExit, become failures."""
    started = time.perf_counter()
    try:
        raw = reward.score_group(inputs) if reward.looks_at_groups else [reward.score(inputs[0])]
        scores = [reward.judged(value) for value in raw]
        if len(scores) != len(inputs):
            raise ValueError(f"the reward returned {len(scores)} scores for {len(inputs)} completions")
    except MemoryError:
        seconds = time.perf_counter() - started
        return CallResult(outcome="out_of_memory", detail="went past its memory limit", seconds=seconds)
    except KeyboardInterrupt:  # the user's, not the reward's
        raise
    except BaseException as error:  # also SystemExit: it must not end the process
        seconds = time.perf_counter() - started
        return CallResult(outcome="raised", detail=describe(error), seconds=seconds)
    verdicts = [None if score is None else score.correct for score in scores]
    return CallResult(
        scores=[None if score is None else float(score) for score in scores],
        correct=[] if set(verdicts) <= {None} else verdicts,
        seconds=time.perf_counter() - started,
    )


def describe(error: BaseException) -> str:
    """`KeyError: 'level', at my_env.py:12`: with the innermost line of the user's own code."""
    try:
        text = f"{type(error).__name__}: {error}"
    except Exception:  # its __str__ raises
        text = type(error).__name__
    place = user_code_location(error)
    return text[:MAX_DETAIL] + (f", at {place}" if place else "")


def per_completion(
    reward: Reward, calls: Sequence[CallResult], num_inputs: int
) -> list[tuple[CallResult, Judged | None]]:
    """The call and the score of every completion, in order.

    A score is None when the call failed, and when the reward is not applicable to that completion.
    """
    found: list[tuple[CallResult, Judged | None]] = []
    for call in calls:
        for index in range(num_inputs if reward.looks_at_groups else 1):
            score = call.scores[index] if call.outcome == "scored" else None
            correct = call.correct[index] if call.correct else None
            found.append((call, None if score is None else Judged(score, correct=correct)))
    return found
