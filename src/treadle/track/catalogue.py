"""Define every metric of a step: name, unit, meaning, healthy range, and what other trainers call it.

The names are those that most people know already (TRL's, then verl's); a name is never reused for something else. Page,
health check, report and docs take the healthy ranges from here. docs/metrics.md is made from this file:

    python -c 'from treadle.track.catalogue import render_page; print(render_page(), end="")' > docs/metrics.md
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from treadle.support import CANARY_BOUNDS_TEXT

SPIKE_TIMES = 10  # a gradient norm or loss that is larger than its usual size by this factor is a spike
ENTROPY_SHARE = 0.1  # of the entropy that a run began with: less is a policy that hardly explores


class Band(msgspec.Struct, frozen=True, omit_defaults=True):
    """The healthy range of a metric; an end that is None is open. The trainer reports values beyond `alarm`, or where
    that is None, beyond the range."""

    low: float | None = None
    high: float | None = None
    alarm: float | None = None  # above `high`
    where: str = ""  # when the range applies: "on-policy"

    @property
    def limit(self) -> float:
        """The value from which the trainer reports the metric, of a range that ends above."""
        limit = self.high if self.alarm is None else self.alarm
        if limit is None:
            raise ValueError(f"{self} has no upper limit")
        return limit

    def __contains__(self, value: float) -> bool:
        return (self.low is None or value >= self.low) and (self.high is None or value <= self.high)

    def __str__(self) -> str:
        """ "below 0.1; alarm above 0.5", "0.8 to 1.2", "above 0.5", "0"."""
        if self.low is not None and self.high is not None:
            text = f"{self.low:g} to {self.high:g}"
        elif self.high == 0:
            text = "0"
        else:
            text = f"below {self.high:g}" if self.high is not None else f"above {self.low:g}"
        return (
            text
            + (f" {self.where}" if self.where else "")
            + ("" if self.alarm is None else f"; alarm above {self.alarm:g}")
        )


@dataclass(frozen=True)
class MetricEntry:
    """One metric. `trl`, `verl` and `atropos` are the names its users look for; "" where they have none."""

    name: str
    unit: str
    meaning: str
    expected: Band | str = ""  # words where the range is no fixed one
    trl: str = ""
    verl: str = ""
    atropos: str = ""

    @property
    def band(self) -> Band | None:
        return self.expected if isinstance(self.expected, Band) else None

    @property
    def healthy(self) -> str:
        """The healthy range in words; "" where there is none."""
        return str(self.expected)

    @property
    def aliases(self) -> dict[str, str]:
        """The names in other dialects: {"verl": "actor/lr", "atropos": "train/lr"}."""
        named = {"trl": self.trl, "verl": self.verl, "atropos": self.atropos}
        return {dialect: name for dialect, name in named.items() if name}


_E = MetricEntry

BATCH = (
    _E("reward", "reward", "Mean score of the rollouts of the step.", "rising",
       trl="reward", verl="critic/rewards/mean"),
    _E("reward_std", "reward", "Spread of the scores inside a group, averaged over the groups.", Band(low=0.0),
       trl="reward_std"),
    _E("frac_reward_zero_std", "fraction", "Groups whose rollouts all scored the same: they carry no gradient.",
       Band(high=0.6), trl="frac_reward_zero_std"),
    _E("by_group/frac_mixed", "fraction", "Groups with both better and worse rollouts: those with a learning signal.",
       Band(low=0.4)),
    _E("by_group/frac_all_good", "fraction", "Groups in which all scores are equal and good: too easy."),
    _E("by_group/frac_all_bad", "fraction", "Groups in which all scores are equal and bad: too hard."),
    _E("completions/mean_length", "tokens", "Mean length of the completions.",
       trl="completions/mean_length", verl="response_length/mean"),
    _E("completions/min_length", "tokens", "Shortest completion.",
       trl="completions/min_length", verl="response_length/min"),
    _E("completions/max_length", "tokens", "Longest completion.",
       trl="completions/max_length", verl="response_length/max"),
    _E("completions/clipped_ratio", "fraction", "Completions that were cut off at the length limit.", Band(high=0.5),
       trl="completions/clipped_ratio", verl="response_length/clip_ratio"),
    _E("completions/repetition", "fraction",
       "Four-token sequences that occurred before in the same completion (completions of 32 tokens or more).",
       Band(high=0.5)),
    _E("num_tokens", "tokens", "Tokens of all batches since the run began.", trl="num_tokens"),
    _E("sample/staleness_mean", "versions", "Policy versions between sampling and training, on average.",
       "at most max_age", trl="sample/staleness_mean", verl="training/off_policy/trajectory_staleness/mean"),
    _E("sample/staleness_max", "versions", "The same for the oldest group of the step.",
       trl="sample/staleness_max", verl="training/off_policy/trajectory_staleness/max"),
    _E("batch/groups_per_step", "groups", "Groups in the batch.", trl="batch/groups_per_step"),
    _E("batch/samples_per_step", "rollouts", "Rollouts in the batch.", trl="batch/samples_per_step"),
    _E("batch/microbatches_per_step", "micros", "Forward and backward passes that the batch was split into.",
       trl="batch/microbatches_per_step"),
    _E("batch/tokens_per_step", "tokens", "Tokens of all sequences, prompts counted once for each rollout.",
       verl="perf/total_num_tokens"),
    _E("batch/forwarded_tokens_per_step", "tokens", "Tokens that went through the model.",
       trl="batch/forwarded_tokens_per_step"),
    _E("batch/trained_tokens_per_step", "tokens", "Tokens with a loss.",
       trl="batch/trained_tokens_per_step"),
    _E("batch/packing_ratio", "ratio",
       "Tokens of the rollouts with a loss, over forwarded tokens: the saving by shared prompts.",
       trl="batch/packing_ratio"),
    _E("batch/row_imbalance", "ratio", "Cost of the most expensive micro over the mean cost.", "near 1",
       trl="batch/row_imbalance"),
    _E("batch/masked_token_frac", "fraction", "Completion tokens that were left out of the loss.",
       trl="batch/masked_token_frac"),
    _E("batch/rejected_rollouts", "rollouts",
       "Rollouts that cannot be used: a number is not finite, too many tokens, or an unknown token id.",
       Band(high=0.0)),
    _E("batch/positive_logprobs_frac", "fraction",
       "Sampled tokens with a positive logprob, which is impossible: the logprobs are wrong or shifted.",
       Band(high=0.0)),
    _E("batch/without_logprobs_frac", "fraction",
       "Trained tokens without a valid logprob of the engine.", Band(high=0.0)),
    _E("rollout/accuracy", "fraction", "Rollouts that the environment called right.", "rising"),
    _E("rollout/truncated", "fraction", "The same as completions/clipped_ratio, as the environment saw it."),
    _E("rollout/generation_s", "s", "Engine time of a group; with several turns, of its slowest rollout.",
       verl="timing_s/gen"),
    _E("rollout/generated_tokens", "tokens", "Tokens sampled for one group."),
    _E("rollout/score_errors", "rollouts", "Rollouts per group whose scoring raised an error.", Band(high=0.0)),
    _E("rollout/score_s", "s", "Time that scoring a group took (rewards, or its own score()), over all its rollouts."),
    _E("rollout/judge/requests", "requests",
       "Requests that the reward `judge` sent for one group, repeated ones too (a judge with a `name`: under that)."),
    _E("rollout/judge/failures", "questions",
       "Questions per group that the judge did not answer in time or not in the form asked for.", Band(high=0.0)),
    _E("rollout/judge/cache_hits", "questions", "Questions per group that the judge had answered before."),
    _E("rollout/judge/tokens", "tokens", "Tokens per group of the judge's prompts and answers, as it reports them."),
    _E("rollout/judge/seconds", "s", "Time of the questions of a group, added up; they are asked in parallel."),
    _E("rollout/group_s", "s", "Stream: time from the beginning of a group to its last score."),
    _E("rollout/in_flight", "groups", "Stream: groups that the environment was working on when it sent this one."),
    _E("rollout/dropped_equal_scores", "groups",
       "Groups that the environment dropped since it last sent one, because all their scores were equal."),
    _E("rollout/dropped_unscored", "groups",
       "Groups that the environment dropped since it last sent one, because no rollout could be scored.",
       Band(high=0.0)),
    _E("rollout/dropped_nothing_sampled", "groups",
       "Groups that the environment dropped since it last sent one, because they have no sampled token.",
       Band(high=0.0)),
    _E("rollout/dropped_oversize", "groups",
       "Groups that the environment dropped since it last sent one, because they are larger than a batch.",
       Band(high=0.0)),
    _E("rollout/dropped_failed", "groups",
       "Groups that the environment dropped since it last sent one, because the engine failed repeatedly.",
       Band(high=0.0)),
)  # fmt: skip

LOSS = (
    _E("loss", "", "What is minimised: policy_loss and the weighted KL term. Its value is no measure of progress. In "
       "`treadle sft`: the mean negative logprob of the trained tokens.",
       trl="loss", atropos="train/loss"),
    _E("policy_loss", "", "The policy's part of the loss; 0 on average when every batch is on-policy.",
       trl="policy_loss", verl="actor/pg_loss"),
    _E("kl", "nats", "The KL term before its coefficient: distance from the policy it is measured against.",
       trl="kl", verl="actor/kl_loss", atropos="grpo/kl_penalty"),
    _E("distill/reverse_kl", "nats",
       "Policy's minus teacher's logprob of the sampled tokens, on average: KL(policy, teacher).", "falling"),
    _E("distill/taught_frac", "fraction", "Trained tokens with a logprob of the teacher."),
    _E("entropy", "nats", "Mean entropy of the distribution of the next token.",
       f"above {100 * ENTROPY_SHARE:g} % of its first value",
       trl="entropy", verl="actor/entropy"),
    _E("mean_ratio", "ratio", "Probability of the sampled tokens now, over that when they were sampled.",
       Band(low=0.8, high=1.2), trl="ratio", atropos="grpo/mean_ratio"),
    _E("mean_kl", "nats", "Distance from the policy that sampled the rollouts (k3 estimate).",
       Band(high=0.1, alarm=0.5), verl="actor/ppo_kl", atropos="grpo/mean_kl"),
    _E("clipped_fraction", "fraction", "Tokens whose ratio was clipped: they have no gradient.",
       Band(high=0.3), verl="actor/pg_clipfrac", atropos="grpo/clipped_fraction"),
    _E("clip_ratio/low_mean", "fraction", "Tokens clipped at the lower bound (negative advantage).",
       trl="clip_ratio/low_mean"),
    _E("clip_ratio/high_mean", "fraction",
       "Tokens clipped at the upper bound (positive advantage) or at dual_clip (negative advantage).",
       trl="clip_ratio/high_mean"),
    _E("clip_ratio/region_mean", "fraction", "Both together.", trl="clip_ratio/region_mean"),
    _E("sampling/sampling_logp_difference/mean", "nats",
       "Absolute difference of the trainer's and the engine's logprob of a token: rounding and staleness.",
       Band(high=0.05, where="on-policy"),  # bf16 rounding between two implementations gives 0.01 to 0.04
       trl="sampling/sampling_logp_difference/mean",
       atropos="alignment/diff_abs_mean"),
    _E("sampling/sampling_logp_difference/max", "nats", "The same for the worst token.",
       trl="sampling/sampling_logp_difference/max", atropos="alignment/diff_max"),
    _E("sampling/importance_sampling_ratio/min", "ratio", "Trainer's over engine's probability, smallest.",
       trl="sampling/importance_sampling_ratio/min"),
    _E("sampling/importance_sampling_ratio/mean", "ratio", "Trainer's over engine's probability, on average.",
       "near 1", trl="sampling/importance_sampling_ratio/mean", verl="rollout_corr/rollout_is_mean"),
    _E("sampling/importance_sampling_ratio/max", "ratio", "Trainer's over engine's probability, largest.",
       trl="sampling/importance_sampling_ratio/max"),
    _E("rollout_corr/kl", "nats", "Engine's minus trainer's logprob, on average (k1 estimate).",
       verl="rollout_corr/kl"),
    _E("rollout_corr/k3_kl", "nats", "Distance between engine and trainer (k3 estimate).", verl="rollout_corr/k3_kl"),
    _E("rollout_corr/chi2_token", "", "Variance of the importance weights of the tokens.", Band(high=1.0),
       verl="rollout_corr/chi2_token"),
    _E("rollout_corr/training_ppl", "", "Perplexity of the sampled tokens under the trainer.",
       verl="rollout_corr/training_ppl"),
    _E("rollout_corr/rollout_ppl", "", "Perplexity of the sampled tokens under the engine.", Band(low=1.0),
       verl="rollout_corr/rollout_ppl"),
    _E("rollout_corr/rollout_is_eff_sample_size", "fraction",
       "Effective sample size of the importance weights, as a share of the tokens.", Band(low=0.5),
       verl="rollout_corr/rollout_is_eff_sample_size"),
    _E("rollout_corr/rollout_is_oob_ratio", "fraction",
       "Tokens whose importance weight is outside its bounds (mask, cap, or 0.5 to 2).",
       verl="rollout_corr/rollout_is_oob_ratio"),
    _E("rollout_corr/rollout_rs_masked_fraction", "fraction",
       "Tokens left out because engine and trainer disagree too much.", Band(high=0.3),
       verl="rollout_corr/rollout_rs_masked_fraction"),
    _E("pos_logp", "nats", "Mean logprob of the tokens with a positive advantage.",
       atropos="train/pos_logp"),
    _E("neg_logp", "nats", "Mean logprob of the tokens with a negative advantage.",
       atropos="train/neg_logp"),
    _E("pos_count", "tokens", "Tokens with a positive advantage."),
    _E("neg_count", "tokens", "Tokens with a negative advantage."),
)  # fmt: skip

STEP = (
    _E("time_s", "s", "Time spent training, including that before a resume."),
    _E("policy_version", "versions", "Version of the weights after the step."),
    _E("grad_norm", "", "Norm of the gradients before they were clipped.", f"no jump by a factor of {SPIKE_TIMES}",
       trl="grad_norm", verl="actor/grad_norm", atropos="train/grad_norm"),
    _E("learning_rate", "", "Learning rate of the step.", trl="learning_rate", verl="actor/lr", atropos="train/lr"),
    _E("skipped_steps", "steps",
       "Steps without an update because the loss or a gradient was not finite, since the run began.",
       Band(high=0.0)),
    _E("skipped_in_a_row", "steps", "Consecutive steps without an update, up to this one.", Band(high=0.0)),
    _E("perf/step_s", "s", "The whole step, from requesting its batch to published weights.",
       trl="step_time", verl="perf/time_per_step", atropos="train/step_time"),
    _E("perf/fwd_bwd_s", "s", "Forward and backward passes.", trl="perf/fwd_bwd_s"),
    _E("perf/optimizer_s", "s", "Clipping and the optimizer's update.", trl="perf/optimizer_s"),
    _E("perf/rollout_wait_s", "s", "Waiting for rollouts, and for a teacher to score them.",
       trl="perf/rollout_wait_s", atropos="train/data_fetch_time"),
    _E("distill/teacher_wait_s", "s", "Of that: waiting for the teacher."),
    _E("distill/teacher_s", "s",
       "Time in which the teacher scored the batch, from the first request to the last answer."),
    _E("distill/teacher_tokens", "tokens", "Tokens that the teacher read for the batch, prompts included."),
    _E("perf/weight_sync_s", "s", "Bringing the new weights to the engine.", trl="perf/weight_sync_s",
       atropos="train/sync_time"),
    _E("perf/weight_sync_pause_s", "s",
       "Of that: waiting until the engine has paused; in modes that restart it, until the last restart is done.",
       trl="perf/weight_sync_pause_s"),
    _E("perf/weight_sync_transfer_s", "s", "Of that: writing or sending the weights.",
       trl="perf/weight_sync_transfer_s"),
    _E("perf/weight_sync_hold_s", "s", "Time during which the engine sampled no token (shared_vllm, reload, delta).",
       "shared_vllm: at most the transfer and 5 ms"),
    _E("perf/weight_sync_verify_s", "s", "Of that: verifying that the weights arrived.",
       "below 1 % of the step on average"),
    _E("sync/bytes", "bytes", "Bytes sent to the engine; 0 if both share one copy of the weights."),
    _E("sync/canary_mean_abs_diff", "nats",
       "Mean difference of the trainer's and the engine's logprobs of the canary, at publishes that run it.",
       f"below {CANARY_BOUNDS_TEXT}"),
    _E("sync/canary_max_abs_diff", "nats", "The same for the worst token.", "below ten times that"),
    _E("perf/mfu_fwd_bwd", "fraction",
       "Share of the card's data-sheet bf16 rate, during forward and backward. Per forwarded token: 6 operations for a"
       " trained weight, 4 for a frozen one.",
       trl="perf/mfu_fwd_bwd", verl="perf/mfu/actor"),
    _E("perf/mfu_wall_clock", "fraction", "The same over the whole step.", trl="perf/mfu_wall_clock"),
    _E("perf/forwarded_tok_s_fwd_bwd", "tokens/s", "Forwarded tokens per second of forward and backward.",
       trl="perf/forwarded_tok_s_fwd_bwd"),
    _E("perf/forwarded_tok_s_wall_clock", "tokens/s", "Forwarded tokens per second of the whole step.",
       trl="perf/forwarded_tok_s_wall_clock"),
    _E("perf/trained_tok_s_wall_clock", "tokens/s",
       "Trained tokens per second of the whole step; 0 when all groups of the step scored the same.",
       trl="perf/trained_tok_s_wall_clock"),
    _E("perf/generated_tok_s_wall_clock", "tokens/s",
       "Sampled tokens of the step's rollouts per second of the whole step."),
    _E("perf/max_memory_allocated_gb", "GB", "Peak device memory of the trainer's tensors.",
       verl="perf/max_memory_allocated_gb", atropos="train/gpu_memory_gb"),
    _E("perf/cpu_memory_used_gb", "GB", "Host memory of the trainer.", verl="perf/cpu_memory_used_gb"),
)  # fmt: skip

SUPERVISED = (
    _E("eval_loss", "nats", "Mean negative logprob of the held-out rows' tokens; step 0 is the model before training.",
       "falling", trl="eval_loss"),
    _E("epoch", "epochs", "Passes over the rows, with the share of the current one.", trl="epoch"),
)  # fmt: skip

SECTIONS = {
    "From the batch": BATCH, "From the loss": LOSS, "From the step": STEP, "Only in `treadle sft`": SUPERVISED,
}  # fmt: skip
DIALECTS = ("trl", "verl", "atropos")
METRICS: dict[str, MetricEntry] = {entry.name: entry for entries in SECTIONS.values() for entry in entries}
Value = TypeVar("Value")


def band_of(name: str) -> Band:
    """The healthy range of a metric that has a fixed one."""
    band = METRICS[name].band
    if band is None:
        raise KeyError(f"{name} has no fixed range")
    return band


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


def render_page() -> str:
    """The text of docs/metrics.md."""
    lines = [
        "# Metrics",
        "",
        "<!-- Made from src/treadle/track/catalogue.py, whose docstring has the command. -->",
        "",
        "`metrics.jsonl` has one line of JSON per optimizer step; `--track wandb,tensorboard,trackio` sends the same",
        "to trackers. `step` counts optimizer steps. A value that is not finite, or that a step does not have, is",
        "written as `null`: if all groups scored the same, no token is trained, and there is no ratio, KL, entropy or",
        "gradient. Charts show a gap there. Other metrics that an environment sends with its groups appear as",
        "`rollout/<name>`, averaged over the groups that have them; with several data sources, score, accuracy and",
        "share of each are `rollout/source/<source>/...` ([environments.md](environments.md#several-sources)). The",
        "environment logs evaluations and tables of rollouts itself,",
        "as a second run in each tracker: [environments.md](environments.md#at-the-trackers).",
        "",
        "`--metric-aliases trl,verl,atropos` also writes the metrics under the names of those systems. When a metric",
        "leaves its healthy range, the trainer logs it and writes an event to `health.jsonl`, which launcher, page and",
        "report show.",
    ]
    for title, entries in SECTIONS.items():
        lines += ["", f"## {title}", "", "| name | unit | meaning | healthy | TRL | verl | Atropos |"]
        lines += ["|---|---|---|---|---|---|---|"]
        lines += [_row(entry) for entry in entries]
    return "\n".join(lines) + "\n"


def _row(entry: MetricEntry) -> str:
    cells = [f"`{entry.name}`", entry.unit, entry.meaning, entry.healthy]
    for alias in (entry.trl, entry.verl, entry.atropos):
        cells.append("same" if alias == entry.name else f"`{alias}`" if alias else "")
    return "| " + " | ".join(cells) + " |"
