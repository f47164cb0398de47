"""Define the charts of the page: metrics, plain names, healthy ranges."""

from __future__ import annotations

import re
from typing import Literal

import msgspec

from treadle.track.names import METRICS


class Band(msgspec.Struct, frozen=True, omit_defaults=True):
    """The healthy range; an end that is None is open."""

    low: float | None = None
    high: float | None = None
    alarm: float | None = None


class Chart(msgspec.Struct, frozen=True, kw_only=True):
    """`stacked`: the parts of one whole. `labels`: the plain names of the metrics, in the order of `names`."""

    title: str
    names: tuple[str, ...]
    labels: tuple[str, ...]
    unit: str = ""
    note: str = ""
    kind: Literal["lines", "stacked"] = "lines"
    has_held_out: bool = False
    band: Band | None = None
    healthy: str = ""


def band_of(healthy: str) -> Band | None:
    """The words of the catalogue as numbers; None where they are no fixed range.

    >>> band_of("below 0.1; alarm above 0.5")
    Band(low=None, high=0.1, alarm=0.5)
    """
    number = r"(-?\d+(?:\.\d+)?)"
    alarm = re.search(rf"alarm above {number}", healthy)
    text = re.split("[;,]", healthy, maxsplit=1)[0].strip()
    limit = float(alarm[1]) if alarm else None
    if found := re.fullmatch(rf"{number} to {number}", text):
        return Band(float(found[1]), float(found[2]), limit)
    if found := re.match(rf"below {number}(?! %)", text):
        return Band(None, float(found[1]), limit)
    if found := re.match(rf"(?:above|at least) {number}", text):
        return Band(float(found[1]), None, limit)
    return None


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
        band=band_of(entry.healthy),
        healthy=entry.healthy,
    )


CHARTS = (
    _chart(
        "Reward and held-out accuracy",
        {"reward": "mean score", "rollout/accuracy": "accuracy in training"},
        note="Lines: rollouts of each step. Dots: held-out answers, with the 95 % interval of their accuracy.",
        has_held_out=True,
    ),
    _chart("KL", {"mean_kl": "from the sampling policy", "kl": "KL term of the loss"}),
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
