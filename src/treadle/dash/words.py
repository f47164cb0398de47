"""What the run is doing now, in plain words. Pure.

"no batch for 42 s: waiting for 2 more groups of gsm8k"
"engine 0 has been adopting version 17 for 40 s"
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from treadle.dash.run_folder import HeldOut

Standing = Literal["live", "complete", "failed", "stopped", "waiting"]


@dataclass(frozen=True, slots=True)
class EngineState:
    """`paused_s`: for how long it has held still; None: it is not paused, or nobody knows."""

    answers: bool
    version: int | None = None
    paused_s: float | None = None


@dataclass(frozen=True, slots=True)
class Situation:
    """Seconds count from now backwards; None: it has not happened, as far as is remembered."""

    explanation: str  # the hub's, why there is no batch
    has_trainer: bool
    step: int  # the last one trained
    planned_steps: int | None
    leased_step: int | None = None
    leased_s: float | None = None
    trained_s: float | None = None
    engine: EngineState | None = None
    is_at_work: bool = True  # a process of the run is heard of
    is_measured: bool = False  # the last evaluation is there, or none is wanted
    result: str = ""  # what was measured, in words
    last_words: str = ""  # the error that ended its last life


def standing(now: Situation) -> Standing:
    """How the run stands as a whole; "waiting": nothing of it has been heard of yet."""
    if now.is_at_work:
        return "complete" if _is_complete(now) and now.is_measured else "live"
    if now.last_words:
        return "failed"
    return "complete" if _is_complete(now) else "stopped" if now.step > 0 else "waiting"


def in_words(situation: Situation) -> list[str]:
    stands = standing(situation)
    if stands in ("failed", "stopped"):
        planned = "" if situation.planned_steps is None else f" of {situation.planned_steps}"
        reason = situation.last_words if stands == "failed" else "nothing of this run is heard of now"
        return [f"{stands} after step {situation.step}{planned}: {reason}"]
    told = [_trainer(situation)]
    if stands == "complete" and situation.result:
        told.append(situation.result)
    engine = situation.engine
    if engine is not None and not _is_complete(situation):
        if not engine.answers:
            told.append("engine 0 does not answer")
        elif engine.paused_s is not None and engine.version is not None:
            told.append(f"engine 0 has been adopting version {engine.version + 1} for {seconds(engine.paused_s)}")
    return told


def _trainer(now: Situation) -> str:
    if _is_complete(now):
        return f"all {now.planned_steps} steps are trained"
    if not now.has_trainer:
        return "no trainer has registered yet"
    if now.leased_step is not None and now.leased_s is not None and now.leased_step > now.step:
        return f"step {now.leased_step} has been in training for {seconds(now.leased_s)}"
    since = now.trained_s if now.trained_s is not None else now.leased_s
    waited = f"no batch for {seconds(since)}" if since is not None else "no batch yet"
    return f"{waited}: {now.explanation}"


def _is_complete(now: Situation) -> bool:
    return now.planned_steps is not None and now.step >= now.planned_steps


def result_in_words(held_out: Sequence[HeldOut]) -> str:
    """ "held-out accuracy 1.6 % -> 73.0 % (67.2 to 78.1, 95 % interval), mean score 0.016 -> 0.710"."""
    if not held_out:
        return ""
    ends = [held_out[0], *held_out[1:][-1:]]
    accuracy = " -> ".join(f"{100 * one.accuracy:.1f} %" for one in ends)
    interval = f"{100 * ends[-1].low:.1f} to {100 * ends[-1].high:.1f}, 95 % interval"
    means = [f"{one.mean_score:.3f}" for one in ends if one.mean_score is not None]
    score = f", mean score {' -> '.join(means)}" if len(means) == len(ends) else ""
    return f"held-out accuracy {accuracy} ({interval}){score}"


def seconds(value: float) -> str:
    """`seconds(42.4)` is "42 s", `seconds(150)` "2 min 30 s", `seconds(7300)` "2 h 1 min"."""
    whole = max(0, round(value))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
