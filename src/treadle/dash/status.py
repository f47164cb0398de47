"""Describe the state of a run in words and tiles. Pure.

"no batch for 42 s: waiting for 2 more groups of gsm8k"
"engine 0 has been loading version 17 for 40 s"
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from treadle.dash.run_folder import Columns, HeldOut
from treadle.formatting import duration, with_interval

WARNING_STEPS = 20  # the trainer repeats a warning that still applies within this many steps
RECENT_STEPS = 10  # speeds and remaining time: means over this many steps
TRAINING_STEPS = 5  # accuracy in training at an evaluation: mean over this many steps
Standing = Literal["live", "complete", "failed", "stopped", "waiting"]


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """`paused_s`: how long it has been paused; None: not paused, or unknown."""

    answers: bool
    version: int | None = None
    paused_s: float | None = None


@dataclass(frozen=True, slots=True)
class RunFacts:
    """Durations are seconds before now; None: it has not happened."""

    explanation: str  # the hub's, why there is no batch
    has_trainer: bool
    step: int  # the last one trained
    planned_steps: int | None
    leased_step: int | None = None
    leased_s: float | None = None
    trained_s: float | None = None
    engine: EngineStatus | None = None
    is_at_work: bool = True  # a process of the run reports
    is_measured: bool = False  # the last evaluation is done, or none is wanted
    result: str = ""  # held-out result in words
    last_words: str = ""  # the error that ended the run
    is_supervised: bool = False  # it trains on rows, without hub and engine


def standing(now: RunFacts) -> Standing:
    """The state of the run as a whole; "waiting": no process has reported and no step is trained."""
    if now.is_at_work:
        return "complete" if _is_complete(now) and now.is_measured else "live"
    if now.last_words:
        return "failed"
    return "complete" if _is_complete(now) else "stopped" if now.step > 0 else "waiting"


def in_words(situation: RunFacts) -> list[str]:
    stands = standing(situation)
    if stands in ("failed", "stopped"):
        planned = "" if situation.planned_steps is None else f" of {situation.planned_steps}"
        reason = situation.last_words if stands == "failed" else "no process of this run reports to the hub"
        return [f"{stands} after step {situation.step}{planned}: {reason}"]
    sentences = [_trainer(situation)]
    if stands == "complete" and situation.result:
        sentences.append(situation.result)
    engine = situation.engine
    if engine is not None and not _is_complete(situation):
        if not engine.answers:
            sentences.append("engine 0 does not answer")
        elif engine.paused_s is not None and engine.version is not None:
            sentences.append(f"engine 0 has been loading version {engine.version + 1} for {duration(engine.paused_s)}")
    return sentences


def _trainer(now: RunFacts) -> str:
    if _is_complete(now):
        return f"all {now.planned_steps} steps are trained"
    if now.is_supervised:
        return f"training step {now.step + 1}" if now.step else "measuring, or training the first step"
    if not now.has_trainer:
        return "no trainer has registered yet"
    if now.leased_step is not None and now.leased_s is not None and now.leased_step > now.step:
        return f"step {now.leased_step} has been in training for {duration(now.leased_s)}"
    since = now.trained_s if now.trained_s is not None else now.leased_s
    waited = f"no batch for {duration(since)}" if since is not None else "no batch yet"
    return f"{waited}: {now.explanation}"


def _is_complete(now: RunFacts) -> bool:
    return now.planned_steps is not None and now.step >= now.planned_steps


def result_in_words(held_out: Sequence[HeldOut]) -> str:
    """ "held-out accuracy 1.6 % → 73.0 % (67.2 to 78.1, 95 % interval), mean score 0.016 → 0.710"."""
    if not held_out:
        return ""
    ends = [held_out[0], *held_out[1:][-1:]]
    accuracy = " → ".join(f"{100 * one.accuracy:.1f} %" for one in ends)
    interval = f"{100 * ends[-1].low:.1f} to {100 * ends[-1].high:.1f}, 95 % interval"
    means = [with_interval(one.mean_score, one.score_low, one.score_high) for one in ends if one.mean_score is not None]
    score = f", mean score {' → '.join(means)}" if len(means) == len(ends) else ""
    return f"held-out accuracy {accuracy} ({interval}){score}{_unscored(ends[-1])}"


def _unscored(held_out: HeldOut) -> str:
    return f", {held_out.num_unscored} answers not scored" if held_out.num_unscored else ""


class Tile(msgspec.Struct, frozen=True, kw_only=True):
    """One figure at the top of the page. `share`: progress from 0 to 1, drawn as a bar."""

    name: str
    value: str
    note: str = ""
    share: float | None = None
    is_bad: bool = False


def tiles_of(columns: Columns, held_out: Sequence[HeldOut], now: RunFacts, num_warnings: int) -> list[Tile]:
    step = now.step
    speeds = {
        "Generated tokens/s": _mean(columns.known("perf/generated_tok_s_wall_clock", RECENT_STEPS)),
        "Trained tokens/s": _mean(columns.known("perf/trained_tok_s_wall_clock", RECENT_STEPS)),
    }
    num_recent = min(RECENT_STEPS, len(columns.steps))
    recent = "last step" if num_recent == 1 else f"mean of the last {num_recent} steps"
    if now.is_supervised:
        del speeds["Generated tokens/s"]
        results = [_change_tile(columns, "Loss", "loss"), _change_tile(columns, "Held-out loss", "eval_loss")]
    else:
        results = [_held_out_tile(held_out), _change_tile(columns, "Reward (mean score)", "reward")]
    return [
        *results,
        *(
            Tile(name=name, value="–", note="after the first step")
            if speed is None
            else Tile(name=name, value=f"{speed:,.0f}", note=recent)
            for name, speed in speeds.items()
        ),
        _step_tile(columns, now),
        Tile(
            name="Health",
            value="no warnings" if not num_warnings else f"{num_warnings} warning{'s' if num_warnings > 1 else ''}",
            note=f"in the last {min(step, WARNING_STEPS)} steps" if step > 1 else "",
            is_bad=num_warnings > 0,
        ),
    ]


def _change_tile(columns: Columns, name: str, metric: str) -> Tile:
    """The last value of a metric, with the first one as a note."""
    column = columns.by_name.get(metric, ())
    known = [(step, value) for step, value in zip(columns.steps, column, strict=False) if not math.isnan(value)]
    note = f"{known[0][1]:.3f} at step {known[0][0]}" if len(known) > 1 else ""
    return Tile(name=name, value=f"{known[-1][1]:.3f}" if known else "–", note=note)


def _held_out_tile(held_out: Sequence[HeldOut]) -> Tile:
    if not held_out:
        return Tile(name="Held-out accuracy", value="–", note="not measured yet")
    ends = [held_out[0], *held_out[1:][-1:]]
    last = ends[-1]
    when = f"step {last.step}" if last.step else "before training"
    return Tile(
        name="Held-out accuracy",
        value=" → ".join(f"{100 * one.accuracy:.1f} %" for one in ends),
        note=f"{100 * last.low:.1f} to {100 * last.high:.1f} % (95 % interval), {when}{_unscored(last)}",
        is_bad=last.num_unscored > 0,
    )


def _step_tile(columns: Columns, now: RunFacts) -> Tile:
    step, planned = now.step, now.planned_steps
    if planned is None:
        return Tile(name="Step", value=f"{step:,}")
    step_s, trained_s = _mean(columns.known("perf/step_s", RECENT_STEPS)), columns.known("time_s", 1)
    note = ""
    if step >= planned and trained_s:
        note = f"trained in {duration(trained_s[-1])}"
    elif step < planned and step_s is not None and now.is_at_work:
        note = f"about {duration(step_s * (planned - step))} left"
    return Tile(name="Step", value=f"{step:,} of {planned:,}", note=note, share=min(1.0, step / max(1, planned)))


def sampling_note(held_out: HeldOut, training: Sequence[float], env: Mapping[str, Any]) -> str:
    """Explain a difference between held-out accuracy and accuracy in training; "" if there is none.

    `training`: the accuracy of the steps before the evaluation. `env`: the settings of the environment.
    """
    accuracy, temperature = _mean(training), float(env.get("temperature", 1.0))
    eval_temperature = env.get("eval_temperature")
    if eval_temperature is None:  # greedy, unless several answers are sampled
        eval_temperature = 0.0 if env.get("eval_samples", 1) == 1 else temperature
    if accuracy is None or held_out.low <= accuracy <= held_out.high or eval_temperature == temperature:
        return ""
    held_out_way = f"sampled at temperature {eval_temperature:g}" if eval_temperature else "greedy"
    return (
        f"At step {held_out.step} the held-out accuracy is {100 * held_out.accuracy:.1f} % and the accuracy in "
        f"training {100 * accuracy:.1f} %: held-out answers are {held_out_way}, training answers are sampled at "
        f"temperature {temperature:g}, and the prompts are different ones."
    )


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
