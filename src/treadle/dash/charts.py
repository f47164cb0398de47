"""Define the charts of the page and downsample the metrics of a run for them.

A long run has more steps than a chart has pixels: each bucket of steps is drawn with its lowest and its highest value,
so no spike is lost.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

import msgspec

from treadle.dash.run_folder import HeldOut, RunFolder
from treadle.track.catalogue import METRICS, Band

Values = list[float | None]
NUM_SYNCS = 300
_SYNC_PARTS = ("pause", "transfer", "verify")
_SYNC_METRICS = {
    "ended_s": "time_s",
    "seconds": "perf/weight_sync_s",
    "bytes": "sync/bytes",
    "version": "policy_version",
    "canary": "sync/canary_mean_abs_diff",
    **{part: f"perf/weight_sync_{part}_s" for part in _SYNC_PARTS},
}

# ---- downsampling


def buckets(steps: Sequence[int], first: int | None, last: int | None, num_points: int) -> list[slice]:
    """Split the rows from step `first` to `last` into slices, so that two points of each make about `num_points`.

    >>> buckets(range(1, 11), None, None, 4)
    [slice(0, 5, None), slice(5, 10, None)]
    """
    begin = 0 if first is None else bisect_left(steps, first)
    end = len(steps) if last is None else bisect_right(steps, last)
    num_rows = end - begin
    if num_rows <= num_points:
        return [slice(row, row + 1) for row in range(begin, end)]
    num_cuts = max(1, num_points // 2)
    edges = [begin + num_rows * cut // num_cuts for cut in range(num_cuts + 1)]
    return [slice(a, b) for a, b in pairwise(edges)]


def bucket_steps(steps: Sequence[int], cuts: Sequence[slice]) -> list[int]:
    """The steps of the points: the first and the last of each bucket."""
    return [step for cut in cuts for step in steps[cut.start : cut.stop : max(1, cut.stop - cut.start - 1)]]


def extremes(column: Sequence[float], cuts: Sequence[slice]) -> Values:
    """The lowest and the highest value of each bucket, in the order of their steps; None: not measured.

    >>> extremes([1.0, 9.0, 3.0, 2.0], [slice(0, 3), slice(3, 4)])
    [1.0, 9.0, 2.0]
    """
    points: Values = []
    for cut in cuts:
        values = column[cut]
        if len(values) == 1:
            points.append(_rounded(values[0]))
            continue
        known = [value for value in values if value == value]  # noqa: PLR0124 - not NaN
        if not known:
            points += [None, None]
            continue
        low, high = min(known), max(known)
        is_rising = known.index(low) <= known.index(high)
        points += [_rounded(low), _rounded(high)] if is_rising else [_rounded(high), _rounded(low)]
    return points


def means(column: Sequence[float], cuts: Sequence[slice]) -> Values:
    """The mean of each bucket, at both of its ends: means may be smoothed and stacked, extremes may not.

    >>> means([1.0, 9.0, 2.0], [slice(0, 2), slice(2, 3)])
    [5.0, 5.0, 2.0]
    """
    points: Values = []
    for cut in cuts:
        known = [value for value in column[cut] if value == value]  # noqa: PLR0124 - not NaN
        mean = _rounded(sum(known) / len(known)) if known else None
        points += [mean] * min(2, cut.stop - cut.start)
    return points


def _rounded(value: float) -> float | None:
    return float(f"{value:.6g}") if math.isfinite(value) else None


# ---- charts


class Chart(msgspec.Struct, frozen=True, kw_only=True):
    """`labels`: plain names of the metrics, in the order of `names`. `held_out_envs`: environments drawn separately."""

    title: str
    names: tuple[str, ...]
    labels: tuple[str, ...]
    unit: str = ""
    note: str = ""
    kind: Literal["lines", "stacked"] = "lines"
    has_held_out: bool = False
    held_out_envs: tuple[str, ...] = ()
    band: Band | None = None
    healthy: str = ""


def _chart(
    title: str, labels: dict[str, str], *, note: str = "", has_held_out: bool = False, stacked: bool = False
) -> Chart:
    """`labels`: metric -> its name in the legend. Unit, band and healthy range are those of the first metric."""
    names = tuple(labels)
    entry = METRICS[names[0]]
    return Chart(
        title=title,
        names=names,
        labels=tuple(labels.values()),
        unit=entry.unit if entry.unit not in ("reward", "ratio") else "",
        note=note or entry.meaning,
        kind="stacked" if stacked else "lines",
        has_held_out=has_held_out,
        band=entry.band,
        healthy=entry.healthy,
    )


DISTANCE_FROM_TEACHER = _chart("Distance from the teacher", {"distill/reverse_kl": "reverse KL"})
CHARTS = (
    _chart(
        "Reward and held-out accuracy",
        {"reward": "mean score", "rollout/accuracy": "accuracy in training"},
        note="Lines: rollouts of each step. Dots: held-out answers, with the 95 % interval of their accuracy.",
        has_held_out=True,
    ),
    _chart("KL", {"mean_kl": "from the sampling policy", "kl": "KL term of the loss"}),
    DISTANCE_FROM_TEACHER,
    _chart("Ratio", {"mean_ratio": "mean ratio"}),
    _chart(
        "Clipped tokens",
        {"clipped_fraction": "all", "clip_ratio/low_mean": "lower bound", "clip_ratio/high_mean": "upper bound"},
    ),
    _chart("Entropy", {"entropy": "mean entropy"}),
    _chart("Gradient norm", {"grad_norm": "before clipping"}),
    _chart(
        "Time per step",
        {
            "perf/rollout_wait_s": "waiting for rollouts",
            "perf/fwd_bwd_s": "forward and backward",
            "perf/optimizer_s": "optimizer",
            "perf/weight_sync_s": "publishing weights",
            "rollout/generation_s": "in parallel: generating a group",
            "rollout/score_s": "in parallel: scoring a group",
        },
        note="The first four add up to the step. Groups are generated and scored in parallel to it.",
        stacked=True,
    ),
    _chart(
        "Completion length",
        {
            "completions/mean_length": "mean",
            "completions/min_length": "shortest",
            "completions/max_length": "longest",
        },
        note="Tokens of the completions of a step.",
    ),
    _chart("Cut off at the length limit", {"completions/clipped_ratio": "completions"}),
    _chart(
        "Tokens per second",
        {
            "perf/generated_tok_s_wall_clock": "generated",
            "perf/trained_tok_s_wall_clock": "trained",
            "perf/forwarded_tok_s_wall_clock": "forwarded",
        },
        note="Generated: sampled for the rollouts. Trained: tokens with a loss; 0 when all groups of the step scored "
        "the same. Forwarded: trained tokens and their prompts.",
    ),
    _chart(
        "MFU",
        {"perf/mfu_wall_clock": "whole step", "perf/mfu_fwd_bwd": "forward and backward"},
        note="Model FLOPs utilization: share of the GPU's peak rate.",
    ),
    _chart("Rollout staleness", {"sample/staleness_mean": "mean", "sample/staleness_max": "oldest group"}),
    _chart(
        "Groups with no learning signal",
        {
            "frac_reward_zero_std": "all scores equal",
            "by_group/frac_all_good": "all good: too easy",
            "by_group/frac_all_bad": "all bad: too hard",
        },
    ),
    _chart(
        "Logprob difference of trainer and engine",
        {
            "sampling/sampling_logp_difference/mean": "mean",
            "sampling/sampling_logp_difference/max": "worst token",
        },
    ),
)


SFT_CHARTS = (
    _chart(
        "Loss",
        {"loss": "training", "eval_loss": "held-out"},
        note="Mean negative logprob of the trained tokens of each step, and of held-out rows.",
    ),
    _chart("Learning rate", {"learning_rate": "learning rate"}),
    *(chart for chart in CHARTS if chart.title in ("Gradient norm", "MFU")),
    _chart(
        "Time per step",
        {"perf/fwd_bwd_s": "forward and backward", "perf/optimizer_s": "optimizer"},
        note="Without the time for the held-out loss and for checkpoints.",
        stacked=True,
    ),
    _chart(
        "Tokens per second",
        {"perf/trained_tok_s_wall_clock": "trained", "perf/forwarded_tok_s_wall_clock": "forwarded"},
        note="Trained: tokens with a loss. Forwarded: these and their prompts.",
    ),
)


def charts_of(run: RunFolder | None) -> tuple[Chart, ...]:
    """The charts of the page: those that the run has metrics for; with several environments or data sources also the
    held-out accuracy of each."""
    if run is not None and run.is_supervised:
        return SFT_CHARTS
    settings = run.config().get("train") if run is not None else None
    has_teacher = isinstance(settings, dict) and bool(settings.get("distill_coef"))
    charts = tuple(chart for chart in CHARTS if has_teacher or chart is not DISTANCE_FROM_TEACHER)
    envs = tuple(run.held_out_by_env()) if run is not None else ()
    if not envs:
        return charts
    kind = "environment" if run is not None and run.config().get("envs") else "data source"
    title, note = f"Held-out accuracy by {kind}", f"Held-out accuracy of each {kind}."
    by_env = Chart(title=title, names=(), labels=(), note=note, held_out_envs=envs)
    return (charts[0], by_env, *charts[1:])


# ---- series of a run


class Series(msgspec.Struct, frozen=True, kw_only=True):
    """`values` holds the extremes of each bucket of steps, `means` their means; None: no step was left out."""

    run: str = ""
    steps: list[int] = []
    values: dict[str, Values] = {}
    means: dict[str, Values] | None = None
    held_out: list[HeldOut] = []
    held_out_by_env: dict[str, list[HeldOut]] = {}  # of several environments
    num_steps: int = 0
    last_step: int = 0
    names: list[str] = []


def series_of(
    run: RunFolder | None, names: Sequence[str], first: int | None, last: int | None, num_points: int
) -> Series:
    if run is None:
        return Series()
    with run.metrics.columns() as columns:
        steps = columns.steps
        cuts = buckets(steps, first, last, num_points)
        known = {name: columns.by_name[name] for name in names if name in columns.by_name}
        is_thinned = any(cut.stop - cut.start > 1 for cut in cuts)
        return Series(
            run=run.name,
            steps=bucket_steps(steps, cuts),
            values={name: extremes(column, cuts) for name, column in known.items()},
            means={name: means(column, cuts) for name, column in known.items()} if is_thinned else None,
            held_out=run.held_out(),
            held_out_by_env=run.held_out_by_env(),
            num_steps=len(steps),
            last_step=steps[-1] if steps else 0,
            names=sorted(columns.by_name),
        )


def syncs_of(run: RunFolder | None) -> dict[str, list[dict[str, float]]]:
    """The last weight syncs: version, end time and duration of each part."""
    if run is None:
        return {"syncs": []}
    with run.metrics.columns() as columns:
        named = {short: columns.by_name[name] for short, name in _SYNC_METRICS.items() if name in columns.by_name}
        known = {short: column[-NUM_SYNCS:] for short, column in named.items()}
        steps = columns.steps[-NUM_SYNCS:]
    rows = [
        {"step": step, **{short: values[row] for short, values in known.items() if not math.isnan(values[row])}}
        for row, step in enumerate(steps)
    ]
    return {"syncs": [row for row in rows if "seconds" in row]}
