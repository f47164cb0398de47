"""Looking names up: the other dialects beside ours, and what earlier releases wrote."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from treadle.track.catalogue import SECTIONS, MetricEntry

DIALECTS = ("trl", "verl", "atropos")
METRICS: dict[str, MetricEntry] = {entry.name: entry for entries in SECTIONS.values() for entry in entries}

# What release 0.1.0 wrote. perf/train_s was fwd_bwd_s + optimizer_s, and both stood beside it.
_FORMER_NAMES = {
    "reward/mean": "reward",
    "reward/std": "reward_std",
    "reward/zero_std_frac": "frac_reward_zero_std",
    "completion/mean_length": "completions/mean_length",
    "completion/max_length": "completions/max_length",
    "age/mean": "sample/staleness_mean",
    "age/max": "sample/staleness_max",
    "batch/groups": "batch/groups_per_step",
    "batch/sequences": "batch/samples_per_step",
    "batch/micros": "batch/microbatches_per_step",
    "batch/tokens": "batch/tokens_per_step",
    "batch/forwarded_tokens": "batch/forwarded_tokens_per_step",
    "batch/loss_tokens": "batch/trained_tokens_per_step",
    "loss/policy": "policy_loss",
    "loss/ratio_mean": "mean_ratio",
    "loss/clipped_frac": "clipped_fraction",
    "loss/kl": "kl",
    "loss/entropy": "entropy",
    "mismatch/logprob_abs_diff_mean": "sampling/sampling_logp_difference/mean",
    "optim/grad_norm": "grad_norm",
    "optim/lr": "learning_rate",
    "optim/skipped_in_a_row": "skipped_in_a_row",
    "perf/wait_s": "perf/rollout_wait_s",
    "perf/gradient_s": "perf/fwd_bwd_s",
    "perf/publish_s": "perf/weight_sync_s",
    "perf/publish_wait_s": "perf/weight_sync_pause_s",
    "perf/publish_write_s": "perf/weight_sync_transfer_s",
    "perf/tokens_per_s": "perf/trained_tok_s_wall_clock",
}

Value = TypeVar("Value")


def with_aliases(metrics: Mapping[str, Value], dialects: Sequence[str]) -> dict[str, Value]:
    """The metrics, and beside them the same values under the names of other trainers.

    >>> with_aliases({"learning_rate": 1e-05}, ["verl", "atropos"])
    {'learning_rate': 1e-05, 'actor/lr': 1e-05, 'train/lr': 1e-05}
    """
    named = dict(metrics)
    for name, value in metrics.items():
        entry = METRICS.get(name)
        if entry is not None:
            aliases = entry.aliases
            named.update({aliases[dialect]: value for dialect in dialects if dialect in aliases})
    return named


def with_todays_names(step: Mapping[str, Any]) -> dict[str, Any]:
    """A line of an earlier release under today's names; a line of today's stays as it is.

    >>> with_todays_names({"step": 3, "reward/mean": 0.25})
    {'step': 3, 'reward': 0.25}
    """
    return {_FORMER_NAMES.get(name, name): value for name, value in step.items()}
