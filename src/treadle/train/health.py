"""Report when a metric leaves its healthy range, and when it is back. Pure.

A message is logged when a problem starts, again if it gets much worse or lasts long, and once when it ends: nobody
would read a message per step. A reward that does not rise is not reported: that is usual in training.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import isfinite

from treadle.track.catalogue import ENTROPY_SHARE, SPIKE_TIMES, band_of

ALIGNMENT = "LogProb Alignment"
NUM_KEPT = 20
NUM_SMOOTHED = 10  # a batch is a small sample: fractions are averaged over this many steps
LOGPROB_GAP = band_of("sampling/sampling_logp_difference/mean").limit
MEAN_LOGPROB_GAP = 2.0
LOW_ENTROPY = 0.05  # nats; an entropy above it is not reported, whatever it was at the start
LOSS_FLOOR = 0.1  # a loss this small is usual, whatever it was before
REPEAT_AFTER_STEPS = 20
MUCH_WORSE = 1.5
CALM_STEPS = 3  # a metric that fluctuates around its bound is not reported as healthy each time

# ---- rules: one function per healthy range


@dataclass(frozen=True)
class HealthFinding:
    """`badness` is 1 at the bound and grows beyond it; `line` says what was measured, what it means and what to do."""

    topic: str
    badness: float
    line: str
    can_wait: bool = False  # it is improving: no message yet


@dataclass
class Observations:
    """The metrics of the last step, and recent values of each."""

    max_age: int = 0
    last: Mapping[str, float] = field(default_factory=dict)
    best: dict[str, float] = field(default_factory=dict)  # the highest mean of ten steps so far
    recent: dict[str, deque[float]] = field(default_factory=dict)
    _first: dict[str, list[float]] = field(default_factory=dict)

    def add(self, metrics: Mapping[str, float]) -> None:
        """Missing values are absent: a step without trained tokens says nothing about the policy."""
        self.last = metrics
        for name, value in metrics.items():
            self.recent.setdefault(name, deque(maxlen=NUM_KEPT)).append(value)
            first = self._first.setdefault(name, [])
            if len(first) < NUM_SMOOTHED:
                first.append(value)
            smooth = self.smooth(name)
            if smooth is not None:
                self.best[name] = max(smooth, self.best.get(name, smooth))

    def smooth(self, name: str) -> float | None:
        """The mean of the last ten steps; None if there are fewer, or if the last step has no value."""
        values = list(self.recent.get(name, ()))[-NUM_SMOOTHED:]
        return statistics.fmean(values) if len(values) == NUM_SMOOTHED and name in self.last else None

    def is_easing(self, name: str) -> bool:
        """Whether the newer half of the last ten steps is clearly lower than the older half."""
        values, half = list(self.recent[name])[-NUM_SMOOTHED:], NUM_SMOOTHED // 2
        return sum(values[half:]) < 0.85 * sum(values[:half])

    def beginning(self, name: str) -> float:
        """The mean of the first ten values."""
        return statistics.fmean(self._first[name])

    @property
    def on_policy_gap(self) -> float | None:
        """Difference between trainer's and engine's logprobs of on-policy rollouts; None if it was not measured."""
        is_measured = self.last.get("rollout_corr/rollout_ppl", 1.0) > 0
        is_on_policy = self.last.get("sample/staleness_max") == 0
        return self.last.get("sampling/sampling_logp_difference/mean") if is_measured and is_on_policy else None


Rule = Callable[[Observations], HealthFinding | None]


def alignment(seen: Observations) -> HealthFinding | None:
    """Does the engine sample from the trained weights? If not, training is meaningless."""
    positive = seen.last.get("batch/positive_logprobs_frac", 0.0)
    if positive > 0:
        return HealthFinding(
            ALIGNMENT, 100.0,
            f"{ALIGNMENT}: MISMATCH! The engine's logprobs are positive at {_percent(positive)} of the tokens: "
            "probabilities, or shifted against the tokens; post the engine's own (server_type vllm)",
        )  # fmt: skip
    rollout_ppl = seen.last.get("rollout_corr/rollout_ppl", 0.0)
    gap = seen.on_policy_gap
    if gap is None or gap <= LOGPROB_GAP:
        return None
    training_ppl = seen.last.get("rollout_corr/training_ppl", 0.0)
    apart = abs(math.log(training_ppl / rollout_ppl)) if training_ppl > 0 and rollout_ppl > 0 else 0.0
    cause = (
        "another model or another tokenizer, or weights that never arrived"
        if apart > MEAN_LOGPROB_GAP
        else "a temperature that was not sent along, another revision of the model, stale weights, or another dtype"
    )
    return HealthFinding(
        ALIGNMENT, gap / LOGPROB_GAP,
        f"{ALIGNMENT}: MISMATCH! Trainer and engine differ by {gap:.3f} per token on rollouts of the same "
        f"version (healthy below {LOGPROB_GAP}); likely: {cause}. Give both the same --model and --dtype",
    )  # fmt: skip


@dataclass(frozen=True)
class UpperLimit:
    """The rule of a metric that must stay below its limit. `line` may name {value}, {percent} and {band}."""

    metric: str
    line: str
    is_smoothed: bool = False  # the mean of the last ten steps counts, not the last value

    def __call__(self, seen: Observations) -> HealthFinding | None:
        value, band = seen.smooth(self.metric) if self.is_smoothed else seen.last.get(self.metric), band_of(self.metric)
        if value is None or value < band.limit or value == band.alarm:  # an alarm is for values above it
            return None
        line = self.line.format(value=value, percent=_percent(value), band=band)
        can_wait = self.is_smoothed and seen.is_easing(self.metric)
        return HealthFinding(self.metric, value / band.limit, line, can_wait)


mean_kl = UpperLimit(
    "mean_kl",
    "mean_kl {value:.2f} (healthy below {band.high:g}): the policy moves away from the sampling policy too fast; lower "
    "--lr or raise --kl-coef",
)
clipped_fraction = UpperLimit(
    "clipped_fraction",
    "clipped_fraction {value:.2f} (healthy {band}): {percent} of the tokens have no gradient; lower --lr",
)
cut_off = UpperLimit(
    "completions/clipped_ratio",
    f"{{percent}} of the completions of the last {NUM_SMOOTHED} steps were cut off at the length limit; "
    "raise --env.max-token-length (and --train.seq-len), or reward shorter answers",
    is_smoothed=True,
)
masked_tokens = UpperLimit(
    "rollout_corr/rollout_rs_masked_fraction",
    "{percent} of the tokens are left out because engine and trainer disagree on them; find out why (dtype, age, "
    "temperature) before widening the mask",
)


def mean_ratio(seen: Observations) -> HealthFinding | None:
    ratio = seen.last.get("mean_ratio")
    band = band_of("mean_ratio")
    if ratio is None or ratio in band:
        return None
    return HealthFinding(
        "mean_ratio", abs(ratio - 1) / abs(band.limit - 1),
        f"mean_ratio {ratio:.2f} (healthy {band}): the policy is far from the sampling policy; "
        "lower --lr or --max-age",
    )  # fmt: skip


def dead_groups(seen: Observations) -> HealthFinding | None:
    dead, limit = seen.smooth("frac_reward_zero_std"), band_of("frac_reward_zero_std").limit
    if dead is None or dead < limit or "distill/reverse_kl" in seen.last:  # a teacher says more than equal scores
        return None
    good, bad = seen.smooth("by_group/frac_all_good"), seen.smooth("by_group/frac_all_bad")
    split, remedy = "", "use prompts of more varied difficulty"
    if good is not None and bad is not None:
        split = f": {_percent(good)} all right, {_percent(bad)} all wrong"
        remedy = "use harder prompts" if good >= bad else "use easier prompts, or a larger --env.group-size"
    return HealthFinding(
        "frac_reward_zero_std", dead / limit,
        f"{_percent(dead)} of the groups of the last {NUM_SMOOTHED} steps carry no gradient{split}; {remedy}",
        seen.is_easing("frac_reward_zero_std"),
    )  # fmt: skip


def entropy(seen: Observations) -> HealthFinding | None:
    """Entropy falls in every training; only a policy that no longer explores is a problem."""
    now = seen.smooth("entropy")
    if now is None or now >= min(LOW_ENTROPY, ENTROPY_SHARE * seen.beginning("entropy")):
        return None
    return HealthFinding(
        "entropy", LOW_ENTROPY / max(now, 1e-6),
        f"entropy fell from {seen.beginning('entropy'):.2f} to {now:.3f}: the policy hardly explores any more; "
        "lower --lr, raise --clip-high or --env.temperature",
    )  # fmt: skip


@dataclass(frozen=True)
class Spike:
    """The rule of a metric that must not jump: by more than SPIKE_TIMES over the median of the previous steps, which
    counts as at least `floor`. `line` may name {value}, {times} and {usual}."""

    metric: str
    line: str
    floor: float = 0.0

    def __call__(self, seen: Observations) -> HealthFinding | None:
        earlier = [abs(value) for value in list(seen.recent.get(self.metric, ()))[:-1]]
        if self.metric not in seen.last or len(earlier) < NUM_SMOOTHED:
            return None
        value, usual = seen.last[self.metric], max(statistics.median(earlier), self.floor)
        if usual <= 0 or abs(value) <= SPIKE_TIMES * usual:
            return None
        times = abs(value) / usual
        return HealthFinding(self.metric, times / SPIKE_TIMES, self.line.format(value=value, times=times, usual=usual))


grad_norm = Spike(
    "grad_norm",
    "grad_norm {value:.3g} is {times:.0f} times its usual {usual:.3g}; it was clipped to --max-grad-norm. If this goes "
    "on, lower --lr",
)
# It is near 0 in a healthy run and need not fall; a spike means a batch that cannot be learned from.
loss = Spike(
    "loss",
    "loss {value:.3g} is {times:.0f} times its usual size; if this goes on, lower --lr, or look at the rollouts of "
    "this step: a few tokens with large ratios or advantages make it",
    floor=LOSS_FLOOR,
)


def reward(seen: Observations) -> HealthFinding | None:
    """Collapse: what was learned is lost again."""
    now, best = seen.smooth("reward"), seen.best.get("reward")
    if now is None or best is None:
        return None
    lost = best - now
    learned = best - min(0.0, seen.beginning("reward"))
    if learned <= 0 or lost <= max(0.5 * learned, 2 * statistics.pstdev(seen.recent["reward"])):
        return None
    return HealthFinding(
        "reward", lost / learned / 0.5,
        f"reward fell from {best:.2f} to {now:.2f} (means of {NUM_SMOOTHED} steps): the policy has collapsed; resume "
        "from an earlier checkpoint with a lower --lr or a --kl-coef of 0.01 to 0.1",
    )  # fmt: skip


def repetition(seen: Observations) -> HealthFinding | None:
    share, limit = seen.smooth("completions/repetition"), band_of("completions/repetition").limit
    if share is None or share < limit or share < 1.5 * seen.beginning("completions/repetition"):
        return None
    return HealthFinding(
        "completions/repetition", share / limit,
        f"{_percent(share)} of the text of the last {NUM_SMOOTHED} steps repeats itself (at the beginning "
        f"{_percent(seen.beginning('completions/repetition'))}); lower --lr, "
        "raise --kl-coef, or penalize repetition",
        seen.is_easing("completions/repetition"),
    )  # fmt: skip


def skipped_steps(seen: Observations) -> HealthFinding | None:
    in_a_row = seen.last.get("skipped_in_a_row", 0.0)
    if in_a_row < 1:
        return None
    total = seen.last.get("skipped_steps", in_a_row)
    return HealthFinding(
        "skipped_steps", in_a_row,
        f"the update was skipped because a gradient was not finite ({in_a_row:.0f} in a row, {total:.0f} in all); "
        "if this goes on, lower --lr or --max-grad-norm",
    )  # fmt: skip


def staleness(seen: Observations) -> HealthFinding | None:
    age, limit = seen.last.get("sample/staleness_mean"), float(max(2 * seen.max_age, 4))
    if age is None or age <= limit:
        return None
    return HealthFinding(
        "sample/staleness_mean", age / limit,
        f"rollouts are {age:.1f} policy versions old on average: environments sample faster than the trainer trains; "
        "run fewer of them, or set --hub.max-age",
    )  # fmt: skip


def sample_size(seen: Observations) -> HealthFinding | None:
    share = seen.last.get("rollout_corr/rollout_is_eff_sample_size")
    lowest = band_of("rollout_corr/rollout_is_eff_sample_size").low or 0.0
    if share is None or share >= lowest:
        return None
    return HealthFinding(
        "rollout_corr/rollout_is_eff_sample_size", lowest / max(share, 1e-6),
        f"a few tokens outweigh the rest (effective sample size {_percent(share)}, healthy above {_percent(lowest)}): "
        "engine and trainer disagree; --mismatch strict bounds it",
    )  # fmt: skip


def missing_logprobs(seen: Observations) -> HealthFinding | None:
    share = seen.last.get("batch/without_logprobs_frac", 0.0)
    if share <= 0:
        return None
    return HealthFinding(
        "batch/without_logprobs_frac", 1.0 + share,
        f"{_percent(share)} of the tokens came without the engine's logprobs and count as sampled just now; "
        "let the environment post them (server_type vllm)",
    )  # fmt: skip


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.01 or share == 0 else f"{100 * share:.1g} %"


RULES: tuple[Rule, ...] = (
    alignment, mean_ratio, mean_kl, clipped_fraction, dead_groups, entropy, grad_norm, loss, reward, repetition,
    skipped_steps, cut_off, staleness, sample_size, masked_tokens, missing_logprobs,
)  # fmt: skip
# A spike is an event, so its end is not reported.
ENDS_SILENTLY = frozenset({"grad_norm", "loss"})

# ---- what to report


@dataclass
class _OpenProblem:
    """A problem that was reported and has not ended yet."""

    reported_at: int
    reported_badness: float
    calm_steps: int = 0


class HealthCheck:
    """Takes the metrics of each step and keeps what it needs for comparisons.

    >>> health = HealthCheck(max_age=1)
    >>> health.check(1, {"clipped_fraction": 0.42})
    ['clipped_fraction 0.42 (healthy below 0.3): 42 % of the tokens have no gradient; lower --lr']
    >>> health.check(2, {"clipped_fraction": 0.41})
    []
    """

    def __init__(self, *, max_age: int = 0) -> None:
        self._seen = Observations(max_age)
        self._open: dict[str, _OpenProblem] = {}
        self._has_reported_alignment = False

    def check(self, step: int, metrics: Mapping[str, object]) -> list[str]:
        """The messages for this step; usually none."""
        self._seen.add({name: float(v) for name, v in metrics.items() if isinstance(v, int | float) and isfinite(v)})
        findings = {found.topic: found for rule in RULES if (found := rule(self._seen)) is not None}
        lines = [found.line for found in findings.values() if self._should_report(step, found)]
        return lines + self._ended(findings) + self._alignment_ok()

    def _should_report(self, step: int, found: HealthFinding) -> bool:
        known = self._open.get(found.topic)
        if known is None and found.can_wait:
            return False
        if known is None:
            self._open[found.topic] = _OpenProblem(step, found.badness)
            return True
        known.calm_steps = 0
        has_lasted = step - known.reported_at >= REPEAT_AFTER_STEPS
        if not has_lasted and found.badness < MUCH_WORSE * known.reported_badness:
            return False
        known.reported_at, known.reported_badness = step, max(found.badness, known.reported_badness)
        return True

    def _ended(self, findings: Mapping[str, HealthFinding]) -> list[str]:
        lines = []
        for topic in [topic for topic in self._open if topic not in findings]:
            self._open[topic].calm_steps += 1
            if self._open[topic].calm_steps >= CALM_STEPS:
                del self._open[topic]
                if topic == ALIGNMENT:
                    self._has_reported_alignment = False  # _alignment_ok reports the end
                elif topic not in ENDS_SILENTLY:
                    lines.append(f"{topic} is back in its healthy range")
        return lines

    def _alignment_ok(self) -> list[str]:
        """Once, at the first on-policy step: the engine samples from the trained weights."""
        gap = self._seen.on_policy_gap
        if self._has_reported_alignment or gap is None or ALIGNMENT in self._open:
            return []
        self._has_reported_alignment = True
        return [f"{ALIGNMENT}: OK (trainer and engine differ by {gap:.3f} per token)"]
