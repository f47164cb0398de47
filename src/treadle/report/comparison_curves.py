"""Curves of a comparison: each metric of a group of runs, as the mean over its seeds with a 95 % interval."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import msgspec

from treadle.dash.charts import CHARTS, Chart, Values, buckets
from treadle.dash.run_folder import HeldOut
from treadle.report.history import History, held_out_of, is_number
from treadle.report.statistics import Estimate, mean_of_seeds
from treadle.track.catalogue import METRICS

NUM_POINTS = 300  # of each curve
HELD_OUT_CHART = Chart(
    title="Held-out accuracy",
    names=(),
    labels=(),
    note="One run: the 95 % interval over its prompts. Several seeds: mean and 95 % interval over the seeds.",
    has_held_out=True,
)


class Curves(msgspec.Struct, frozen=True, kw_only=True):
    """The metrics of a group over the steps: means over its runs; `low`, `high`: 95 % interval over seeds."""

    name: str
    steps: dict[str, list[int]]
    values: dict[str, Values]
    low: dict[str, Values]
    high: dict[str, Values]
    held_out: list[HeldOut]


def _one_metric(chart: Chart) -> Chart:
    """The first metric only, because the lines are the groups; of the parts of a step their sum."""
    name, label = ("perf/step_s", "whole step") if chart.kind == "stacked" else (chart.names[0], chart.labels[0])
    title = f"Reward ({label})" if chart.has_held_out else f"{chart.title}: {label}"
    changes: dict[str, Any] = {"names": (name,), "labels": (label,), "title": title, "note": METRICS[name].meaning}
    return msgspec.structs.replace(chart, **changes, kind="lines", has_held_out=False)


METRIC_CHARTS = tuple(map(_one_metric, CHARTS))


def curves_of(name: str, histories: Sequence[History]) -> Curves:
    """The curves of the runs of one group."""
    curves = Curves(name=name, steps={}, values={}, low={}, high={}, held_out=_points(histories))
    for metric in (chart.names[0] for chart in METRIC_CHARTS):
        columns = [_column(history, metric) for history in histories]
        estimates = estimates_by_step(columns)
        if not estimates:
            continue
        curves.steps[metric] = list(estimates)
        curves.values[metric] = [_short(one.mean) for one in estimates.values()]
        if len(histories) > 1:
            curves.low[metric] = [_short(one.low) for one in estimates.values()]
            curves.high[metric] = [_short(one.high) for one in estimates.values()]
    return curves


def estimates_by_step(columns: Sequence[Mapping[int, float]], num_points: int = NUM_POINTS) -> dict[int, Estimate]:
    """The mean over runs at each step that all have; more than `num_points` steps are averaged in buckets.

    >>> estimates_by_step([{1: 0.2, 2: 0.4}, {1: 0.4}])[1].mean
    0.30000000000000004
    """
    steps = sorted(set.intersection(*(set(column) for column in columns)))
    cuts = [steps[cut] for cut in buckets(steps, None, None, 2 * num_points)]
    return {cut[0]: mean_of_seeds([fmean(column[step] for step in cut) for column in columns]) for cut in cuts}


def _column(history: History, metric: str) -> dict[int, float]:
    return {int(step["step"]): float(value) for step in history.steps if is_number(value := step.get(metric))}


def _points(histories: Sequence[History]) -> list[HeldOut]:
    """The evaluations of one run, or their means over seeds at the steps that all runs have."""
    if len(histories) == 1:
        return [held_out_of(one) for one in histories[0].evaluations]
    by_step = [{one.step: one for one in history.evaluations} for history in histories]
    points = []
    for step in sorted(set.intersection(*map(set, by_step))):
        one = mean_of_seeds([evaluations[step].accuracy for evaluations in by_step]).as_share()
        low, high = one.mean if one.low is None else one.low, one.mean if one.high is None else one.high
        points.append(HeldOut(step, one.mean, low, high, None, by_step[0][step].num_prompts))
    return points


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")
