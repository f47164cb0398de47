"""What became of scoring one completion. A failure is told apart from a low score: it has no score at all."""

from __future__ import annotations

from typing import Literal

import msgspec

Outcome = Literal["scored", "timed_out", "raised", "out_of_memory", "worker_died"]


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
    """Of one call of one reward: a score for each completion it was given, or what happened instead."""

    scores: list[float | None] = []  # None: the reward is not applicable to that completion
    correct: list[bool | None] = []  # empty: no verdicts
    outcome: Outcome = "scored"
    detail: str = ""
    seconds: float = 0.0
