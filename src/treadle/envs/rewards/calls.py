"""One call of one reward, at the border to code that a user wrote: whatever it does becomes a result."""

from __future__ import annotations

import time
from collections.abc import Sequence

from treadle.envs.rewards.base import Judged, Reward, RewardInput
from treadle.envs.rewards.outcome import CallResult
from treadle.envs.rewards.source import place_of

MAX_DETAIL = 500  # letters; an error may quote a whole completion


def calls_for(reward: Reward, inputs: Sequence[RewardInput]) -> list[list[RewardInput]]:
    """What goes into one call: a completion, or all of the group when the reward looks at groups."""
    if reward.looks_at_groups:
        return [list(inputs)] if inputs else []
    return [[completion] for completion in inputs]


def judge(reward: Reward, inputs: Sequence[RewardInput]) -> CallResult:
    """Call the reward. A reward that raises, or asks to exit, is recorded."""
    started = time.perf_counter()
    try:
        raw = reward.score_group(inputs) if reward.looks_at_groups else [reward.score(inputs[0])]
        scores = [reward.judged(value) for value in raw]
        if len(scores) != len(inputs):
            raise ValueError(f"the reward returned {len(scores)} scores for {len(inputs)} completions")
    except MemoryError:
        return CallResult(outcome="out_of_memory", detail="went past its memory limit", seconds=_since(started))
    except KeyboardInterrupt:  # the user's, not the reward's
        raise
    except BaseException as error:  # SystemExit too: it is the reward that gave up, not the process
        return CallResult(outcome="raised", detail=describe(error), seconds=_since(started))
    verdicts = [None if score is None else score.correct for score in scores]
    return CallResult(
        scores=[None if score is None else float(score) for score in scores],
        correct=[] if set(verdicts) <= {None} else verdicts,
        seconds=_since(started),
    )


def describe(error: BaseException) -> str:
    """`KeyError: 'level', at my_env.py:12`: the place is the innermost line of the user's own code."""
    try:
        text = f"{type(error).__name__}: {error}"
    except Exception:  # an error that cannot even be shown
        text = type(error).__name__
    place = place_of(error)
    return text[:MAX_DETAIL] + (f", at {place}" if place else "")


def per_completion(
    reward: Reward, calls: Sequence[CallResult], num_inputs: int
) -> list[tuple[CallResult, Judged | None]]:
    """The results of a reward's calls -> the call and the score of every completion, in order.

    A score is None when the call failed, and when the reward is not applicable to that completion.
    """
    if reward.looks_at_groups:
        places = [(call, place) for call in calls for place in range(num_inputs)]
    else:
        places = [(call, 0) for call in calls]
    return [(call, _score_at(call, place)) for call, place in places]


def _score_at(call: CallResult, place: int) -> Judged | None:
    score = call.scores[place] if call.outcome == "scored" else None
    return None if score is None else Judged(score, correct=call.correct[place] if call.correct else None)


def _since(started: float) -> float:
    return time.perf_counter() - started
