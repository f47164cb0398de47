"""Which figures the page draws, and the bands in which they are healthy."""

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
    """`stacked`: the parts of one whole. `note` says what a reader would else ask."""

    title: str
    names: tuple[str, ...]
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
    told = re.split("[;,]", healthy, maxsplit=1)[0].strip()
    limit = float(alarm[1]) if alarm else None
    if found := re.fullmatch(rf"{number} to {number}", told):
        return Band(float(found[1]), float(found[2]), limit)
    if found := re.match(rf"below {number}(?! %)", told):
        return Band(None, float(found[1]), limit)
    if found := re.match(rf"(?:above|at least) {number}", told):
        return Band(float(found[1]), None, limit)
    return None


def _chart(title: str, *names: str, note: str = "", has_held_out: bool = False, stacked: bool = False) -> Chart:
    """Unit, band and words are those of the first figure."""
    entry = METRICS[names[0]]
    return Chart(
        title=title,
        names=names,
        unit=entry.unit,
        note=note or entry.meaning,
        kind="stacked" if stacked else "lines",
        has_held_out=has_held_out,
        band=band_of(entry.healthy),
        healthy=entry.healthy,
    )


CHARTS = (
    _chart(
        "Reward and held-out accuracy",
        "reward",
        "rollout/accuracy",
        note="Mean score of the rollouts and their accuracy; as dots, both of the held-out answers (accuracy with its "
        "95 % interval).",
        has_held_out=True,
    ),
    _chart("KL", "mean_kl", "kl"),
    _chart("Ratio", "mean_ratio"),
    _chart("Clipped share", "clipped_fraction", "clip_ratio/low_mean", "clip_ratio/high_mean"),
    _chart("Entropy", "entropy"),
    _chart("Gradient norm", "grad_norm"),
    _chart(
        "Time per step",
        "perf/rollout_wait_s",
        "perf/fwd_bwd_s",
        "perf/optimizer_s",
        "perf/weight_sync_s",
        "rollout/generation_s",
        "rollout/score_s",
        note="Wait, train (forward and backward, optimizer) and publish add up to the step; on top of them how long "
        "a group took to generate and to score, which goes on beside it.",
        stacked=True,
    ),
    _chart("Completion length", "completions/mean_length", "completions/min_length", "completions/max_length"),
    _chart("Cut off at the length limit", "completions/clipped_ratio"),
    _chart(
        "Tokens per second",
        "perf/generated_tok_s_wall_clock",
        "perf/trained_tok_s_wall_clock",
        "perf/forwarded_tok_s_wall_clock",
        note="Generated: sampled for the rollouts of the step. Trained: those with a loss; none when all groups of the "
        "step scored the same. Forwarded: trained tokens and prompts that went through the model.",
    ),
    _chart("MFU", "perf/mfu_wall_clock", "perf/mfu_fwd_bwd", note="Share of the card's peak rate; none on a CPU."),
    _chart("Age of the rollouts", "sample/staleness_mean", "sample/staleness_max"),
    _chart("Groups without a lesson", "frac_reward_zero_std", "by_group/frac_all_good", "by_group/frac_all_bad"),
    _chart(
        "Trainer against engine",
        "sampling/sampling_logp_difference/mean",
        "sampling/sampling_logp_difference/max",
    ),
)
