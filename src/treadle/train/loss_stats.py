"""What the objective tells about itself: sums over tokens on the device, and the metrics made of them on the host."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import pad

from treadle.config.train import ObjectiveOptions

USUAL_MISMATCH = (0.5, 2.0)  # what counts as out of bounds where neither a mask nor a cap says otherwise
MAX_EXPONENT = 700.0  # e^709 is the largest that a float holds
ADDED_UP = frozenset({"loss", "policy_loss", "pos_count", "neg_count"})  # of no tokens 0; all else is a mean or so


@dataclass(frozen=True, eq=False)
class MeasuredTokens:
    """One value per token of a micro, from which its sums are made."""

    policy_loss_L: Tensor  # weighted
    kl_loss_L: Tensor  # weighted, times kl_coef
    logprobs_L: Tensor
    entropy_L: Tensor
    advantages_L: Tensor
    ratio_L: Tensor
    is_clipped_low_L: Tensor
    is_clipped_high_L: Tensor
    kl_L: Tensor  # the configured estimator against its target
    rollout_kl_L: Tensor  # k3 against the policy that sampled
    own_logprobs_L: Tensor  # the trainer's before the batch's first update
    rollout_logprobs_L: Tensor
    log_mismatch_L: Tensor  # own - rollout, bounded so that its exponential's square fits fp32
    is_known_L: Tensor  # the environment sent the engine's logprob
    is_masked_L: Tensor


@dataclass(frozen=True, eq=False)
class Stats:
    """Sums and maxima over the tokens of micros. They stay on the device: only `metrics` waits for it.

    >>> none = Stats().add(Stats()).metrics()
    >>> none["loss"], none["mean_ratio"]
    (0.0, nan)
    """

    sum_names: tuple[str, ...] = ()
    maximum_names: tuple[str, ...] = ()
    sums: Tensor = field(default_factory=lambda: torch.zeros(0))
    maxima: Tensor = field(default_factory=lambda: torch.zeros(0))

    def add(self, other: Stats) -> Stats:
        """Those of both, as if their tokens had been in one micro; `Stats()` adds nothing."""
        if not self.sum_names or not other.sum_names:
            return self if self.sum_names else other
        return Stats(
            self.sum_names, self.maximum_names, self.sums + other.sums, torch.maximum(self.maxima, other.maxima)
        )

    def metrics(self) -> dict[str, float]:
        """Everything by its name. Without any token a mean has no value, so it is NaN, which is drawn as a gap;
        tokens without any logprob of the engine's count as agreeing with it: ratios are 1, distances 0."""
        names = (*self.sum_names, *self.maximum_names)
        values = torch.cat([self.sums, self.maxima]).tolist()  # the one wait for the device
        total: defaultdict[str, float] = defaultdict(float, zip(names, values, strict=True))
        num_tokens, num_known = total["tokens"], total["known"]

        def mean(name: str, count: float = num_tokens, empty: float = 0.0) -> float:
            return total[name] / count if count else empty

        def over_known(name: str) -> float:
            return mean(name, num_known)

        num_clipped = total["clipped_low"] + total["clipped_high"]
        clipped_fraction = num_clipped / num_tokens if num_tokens else 0.0
        effective = total["weight"] ** 2 / (num_known * total["weight_squared"]) if num_known else 1.0
        found = {
            "loss": total["policy_loss"] + total["kl_loss"],  # what is minimised, the KL term included
            "policy_loss": total["policy_loss"],  # the same without the KL term
            "kl": mean("kl"),  # the configured estimator against its target, per token
            "entropy": mean("entropy"),  # of the distribution each token was drawn from, per token
            "mean_ratio": mean("ratio"),  # the ratio that is clipped, per token
            "mean_kl": over_known("rollout_kl"),  # k3 of the policy as it is now against the one that sampled
            "clipped_fraction": clipped_fraction,  # tokens whose gain is cut, so that they do not push further
            "clip_ratio/low_mean": mean("clipped_low"),  # those of them whose ratio is below
            "clip_ratio/high_mean": mean("clipped_high"),  # and above
            "clip_ratio/region_mean": clipped_fraction,  # the same as clipped_fraction, under the other name
            "sampling/sampling_logp_difference/mean": over_known("difference"),  # |trainer's - engine's logprob|
            "sampling/sampling_logp_difference/max": total["max_difference"] if num_known else 0.0,  # the largest
            # probability by the trainer before the first update over that by the engine: mean, smallest, largest
            "sampling/importance_sampling_ratio/mean": mean("weight", num_known, empty=1.0),
            "sampling/importance_sampling_ratio/min": _exp(-total["max_negated_log_weight"]) if num_known else 1.0,
            "sampling/importance_sampling_ratio/max": _exp(total["max_log_weight"]) if num_known else 1.0,
            "rollout_corr/kl": over_known("k1"),  # engine's - trainer's logprob: KL(engine, trainer), unbiased
            "rollout_corr/k3_kl": over_known("k3"),  # the same KL by the estimator that is never negative
            "rollout_corr/chi2_token": over_known("chi2"),  # mean squared weight - 1
            "rollout_corr/training_ppl": _exp(-over_known("own_logprob")) if num_known else 0.0,  # e^-mean logprob
            "rollout_corr/rollout_ppl": _exp(-over_known("rollout_logprob")) if num_known else 0.0,  # the engine's
            # how much of the tokens is left once they are weighted: 1 when all weigh the same
            "rollout_corr/rollout_is_eff_sample_size": min(effective, 1.0),  # rounding must not make it more
            "rollout_corr/rollout_is_oob_ratio": over_known("out_of_bounds"),  # weights outside mask, cap or 0.5..2
            "rollout_corr/rollout_rs_masked_fraction": over_known("masked"),  # tokens that the mask left without loss
            "batch/without_logprobs_frac": 1 - num_known / num_tokens if num_tokens else 0.0,  # the engine's, not sent
            "pos_logp": mean("positive_logprob", total["positive"]),  # own logprob of tokens with positive advantage
            "neg_logp": mean("negative_logprob", total["negative"]),  # and with negative
            "pos_count": total["positive"],  # how many tokens have a positive advantage
            "neg_count": total["negative"],  # and how many a negative one
        }
        if num_tokens:
            return found
        return {name: value if name in ADDED_UP else math.nan for name, value in found.items()}


@torch.no_grad()
def measure(tokens: MeasuredTokens, options: ObjectiveOptions) -> Stats:
    """The sums of one micro, added in float64 so that a step of millions of tokens loses no digits."""
    is_known_L, log_weight_L = tokens.is_known_L, tokens.log_mismatch_L
    weight_L = log_weight_L.exp()
    difference_L = tokens.own_logprobs_L - tokens.rollout_logprobs_L
    is_positive_L, is_negative_L = tokens.advantages_L > 0, tokens.advantages_L < 0
    over_all = {
        "tokens": torch.ones_like(tokens.logprobs_L),
        "known": is_known_L,
        "policy_loss": tokens.policy_loss_L,
        "kl_loss": tokens.kl_loss_L,
        "kl": tokens.kl_L,
        "entropy": tokens.entropy_L,
        "ratio": tokens.ratio_L,
        "clipped_low": tokens.is_clipped_low_L,
        "clipped_high": tokens.is_clipped_high_L,
        "positive": is_positive_L,
        "negative": is_negative_L,
        "positive_logprob": tokens.logprobs_L.masked_fill(~is_positive_L, 0.0),
        "negative_logprob": tokens.logprobs_L.masked_fill(~is_negative_L, 0.0),
    }
    over_known = {
        "rollout_kl": tokens.rollout_kl_L,
        "difference": difference_L.abs(),
        "weight": weight_L,
        "weight_squared": weight_L.square(),
        "k1": -difference_L,
        "k3": torch.expm1(log_weight_L) - log_weight_L,
        "chi2": torch.expm1(2 * log_weight_L),  # the squared weight - 1 without losing the digits that they share
        "own_logprob": tokens.own_logprobs_L,
        "rollout_logprob": tokens.rollout_logprobs_L,
        "out_of_bounds": outside(weight_L, *_bounds(options)).to(weight_L.dtype),
        "masked": tokens.is_masked_L.to(weight_L.dtype),
    }
    largest = {
        "max_difference": difference_L.abs(), "max_log_weight": log_weight_L, "max_negated_log_weight": -log_weight_L,
    }  # fmt: skip
    # Chosen by a mask of the same length, never by an index: a length that depends on values would wait for the device.
    rows = [*over_all.values(), *(row_L.masked_fill(~is_known_L, 0.0) for row_L in over_known.values())]
    maxima = torch.stack([row_L.masked_fill(~is_known_L, -math.inf) for row_L in largest.values()])
    return Stats(
        (*over_all, *over_known),
        tuple(largest),
        torch.stack([row_L.double() for row_L in rows]).sum(1),
        pad(maxima.double(), (0, 1), value=-math.inf).amax(1),  # one more, so that there is a largest of no tokens
    )


def outside(values_L: Tensor, low: float | None, high: float | None) -> Tensor:
    """Which values lie outside of [low, high], None being no bound. A NaN does not: it must not be masked away."""
    is_outside_L = torch.zeros_like(values_L, dtype=torch.bool)
    if low is not None:
        is_outside_L = is_outside_L | (values_L < low)
    if high is not None:
        is_outside_L = is_outside_L | (values_L > high)
    return is_outside_L


def _bounds(options: ObjectiveOptions) -> tuple[float, float]:
    lows = (options.importance_mask_low, USUAL_MISMATCH[0])
    highs = (options.importance_mask_high, options.importance_cap, USUAL_MISMATCH[1])
    return next(low for low in lows if low is not None), next(high for high in highs if high is not None)


def _exp(exponent: float) -> float:
    return math.exp(min(exponent, MAX_EXPONENT)) if not math.isnan(exponent) else exponent
