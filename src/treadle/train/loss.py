"""Compute the objective and its metrics for the tokens of one micro, in fp32. Pure.

    loss = sum over tokens of  weight * (policy term + kl_coef * KL estimate)

Nothing is divided by a count here: the weights contain each token's share in the step, so the losses of micros add up
to the loss of the step however it is split. docs/objectives.md describes the settings.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import pad

from treadle.config.train import ObjectiveOptions

# Bound for exponents: e^20 is 5e8, far beyond any meaningful ratio, and its square times any weight still fits fp32. So
# there is no inf, and no inf * 0, which would be NaN and make the whole step useless.
MAX_LOG_RATIO = 20.0
USUAL_MISMATCH = (0.5, 2.0)  # bounds for the out-of-bounds metric, unless a mask or cap is set
MAX_EXPONENT = 700.0  # e^709 is the largest float
SUM_METRICS = frozenset({"loss", "policy_loss", "pos_count", "neg_count"})  # 0 without tokens; all others are NaN

# ---- the objective


@dataclass(frozen=True, eq=False)
class LossTokens:
    """The tokens of one micro that carry loss. `_L`: one value per token, fp32, without gradient.

    All loss tokens of a sequence are in the same micro: sequence-level ratios need all of them.
    """

    rollout_logprobs_L: Tensor  # the engine's; NaN: not sent, the token counts as sampled from the old policy
    old_logprobs_L: Tensor | None  # the trainer's before the first update on the batch; None: the current ones
    reference_logprobs_L: Tensor | None  # of the starting model; for kl_against "reference"
    advantages_L: Tensor
    weights_L: Tensor  # the token's share in the mean over the step
    sequences_L: Tensor  # long: which sequence of the micro the token belongs to
    num_sequences: int
    teacher_logprobs_L: Tensor | None = None  # NaN: unknown; None: nothing is distilled
    teacher_coefs_L: Tensor | None = None  # weight of the reverse KL to the teacher; given with the teacher's logprobs


def policy_loss(
    logprobs_L: Tensor, entropy_L: Tensor, tokens: LossTokens, options: ObjectiveOptions
) -> tuple[Tensor, LossStats]:
    """The micro's part of the loss, with a gradient through `logprobs_L` only, and of the metrics.

    A bad token that became three times as likely costs 3, and is pushed down:

    >>> one_L = torch.ones(1)
    >>> tokens = LossTokens(0 * one_L, None, None, -one_L, one_L, torch.zeros(1, dtype=torch.long), 1)
    >>> logprobs_L = torch.tensor([3.0]).log().requires_grad_()
    >>> loss, stats = policy_loss(logprobs_L, 0 * one_L, tokens, ObjectiveOptions())
    >>> loss.backward()
    >>> round(loss.item(), 4), round(logprobs_L.grad.item(), 4), round(stats.metrics()["mean_ratio"], 4)
    (3.0, 3.0, 3.0)
    """
    own_L = logprobs_L.detach() if tokens.old_logprobs_L is None else tokens.old_logprobs_L
    is_known_L = ~tokens.rollout_logprobs_L.isnan()
    rollout_L = torch.where(is_known_L, tokens.rollout_logprobs_L, own_L)
    log_mismatch_L = (own_L - rollout_L).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    mismatch_L = log_mismatch_L.exp()
    is_masked_L = outside(mismatch_L, *(options.importance_mask or (0.0, math.inf)))

    advantages_L = distilled_advantages(tokens, own_L)
    old_L = rollout_L if options.old_logprobs == "rollout" else own_L
    ratio_L = importance_ratio(logprobs_L - old_L, tokens, options.ratio)
    policy_L = policy_terms(ratio_L, logprobs_L, advantages_L, options)
    if options.importance_cap is not None:
        policy_L = policy_L * mismatch_L.clamp(max=options.importance_cap)
    kl_L = _kl_to_target(logprobs_L, rollout_L, tokens, options)

    weighted_policy_L = tokens.weights_L * policy_L.masked_fill(is_masked_L, 0.0)
    # A KL that is only reported may be infinite; with a coefficient of 0 the term must still be 0.
    weighted_kl_L = torch.zeros_like(kl_L)
    if options.kl_coef:
        weighted_kl_L = options.kl_coef * tokens.weights_L * kl_L.masked_fill(is_masked_L, 0.0)
    with torch.no_grad():
        is_low_L, is_high_L = clipped(ratio_L, advantages_L, options)
        measured = MeasuredTokens(
            policy_loss_L=weighted_policy_L,
            kl_loss_L=weighted_kl_L,
            logprobs_L=logprobs_L,
            entropy_L=entropy_L,
            advantages_L=advantages_L,
            ratio_L=ratio_L,
            is_clipped_low_L=is_low_L,
            is_clipped_high_L=is_high_L,
            kl_L=kl_L,
            rollout_kl_L=kl_terms(logprobs_L - rollout_L, "k3"),
            own_logprobs_L=own_L,
            rollout_logprobs_L=rollout_L,
            log_mismatch_L=log_mismatch_L,
            is_known_L=is_known_L,
            is_masked_L=is_masked_L,
            teacher_logprobs_L=tokens.teacher_logprobs_L,
        )
    loss = weighted_policy_L.sum()
    if options.kl_coef:
        loss = loss + weighted_kl_L.sum()
    return loss, measure(measured, options)


def distilled_advantages(tokens: LossTokens, own_L: Tensor) -> Tensor:
    """Advantages minus the reverse KL of each token to the teacher, times its coefficient. `own_L`: the policy's
    logprobs before the first update on the batch.

    On the policy's own samples, the mean gradient of this term is that of KL(policy, teacher) of the next token, summed
    over the tokens.
    """
    if tokens.teacher_logprobs_L is None or tokens.teacher_coefs_L is None:
        return tokens.advantages_L
    return tokens.advantages_L - tokens.teacher_coefs_L * reverse_kl(own_L, tokens.teacher_logprobs_L)


def reverse_kl(own_L: Tensor, teacher_L: Tensor) -> Tensor:
    """log(policy / teacher) of each sampled token: an unbiased estimate of KL(policy, teacher); 0 where the teacher's
    logprob is unknown."""
    return torch.where(teacher_L.isnan(), 0.0, own_L - teacher_L)


def importance_ratio(log_ratio_L: Tensor, tokens: LossTokens, kind: str) -> Tensor:
    """Ratio of each token ("token"), or of its sequence: the geometric mean ("sequence_mean") or the product."""
    if kind == "token":
        return _with_tangent(torch.exp, log_ratio_L)
    empty_S = log_ratio_L.new_zeros(tokens.num_sequences)
    where = (tokens.sequences_L,)
    # on a GPU index_put adds in a fixed order, index_add does not, and the same seed must give the same run
    log_ratio_S = empty_S.index_put(where, log_ratio_L, accumulate=True)
    if kind == "sequence_mean":
        lengths_S = empty_S.index_put(where, torch.ones_like(log_ratio_L), accumulate=True)
        log_ratio_S = log_ratio_S / lengths_S.clamp(min=1)
    return _with_tangent(torch.exp, log_ratio_S)[tokens.sequences_L]


def policy_terms(ratio_L: Tensor, logprobs_L: Tensor, advantages_L: Tensor, options: ObjectiveOptions) -> Tensor:
    """The policy loss of each token, before weights.

    "clip": the smaller of the clipped and the unclipped gain, for both signs of the advantage. A token never gains by
    moving further out, and a bad token that became more likely is always pushed back.
    "cispo": a weighted logprob. The clipped ratio is only a weight, so even a clipped token has a gradient.
    """
    if options.surrogate == "cispo":
        return -ratio_L.detach().clamp(max=1 + options.clip_high) * advantages_L * logprobs_L
    inside_L = ratio_L.clamp(1 - options.clip_low, 1 + options.clip_high)
    gain_L = torch.minimum(ratio_L * advantages_L, inside_L * advantages_L)
    if options.dual_clip is not None:
        gain_L = torch.where(advantages_L < 0, torch.maximum(gain_L, options.dual_clip * advantages_L), gain_L)
    return -gain_L


def clipped(ratio_L: Tensor, advantages_L: Tensor, options: ObjectiveOptions) -> tuple[Tensor, Tensor]:
    """Which tokens the surrogate clips because their ratio is too low, and which because it is too high."""
    if options.surrogate == "cispo":
        return torch.zeros_like(ratio_L, dtype=torch.bool), ratio_L > 1 + options.clip_high
    is_low_L = (ratio_L < 1 - options.clip_low) & (advantages_L < 0)
    is_high_L = (ratio_L > 1 + options.clip_high) & (advantages_L > 0)
    if options.dual_clip is not None:
        is_high_L = is_high_L | ((ratio_L > options.dual_clip) & (advantages_L < 0))
    return is_low_L, is_high_L


def kl_terms(log_ratio_L: Tensor, estimator: str) -> Tensor:
    """Estimate KL(policy, target) per token from log(policy / target).

    >>> [round(kl_terms(torch.tensor(0.5), estimator).item(), 6) for estimator in ("k1", "k2", "k3")]
    [0.5, 0.125, 0.106531]
    """
    if estimator == "k1":
        return log_ratio_L
    if estimator == "k2":
        return log_ratio_L.square() / 2
    return _with_tangent(torch.expm1, -log_ratio_L) + log_ratio_L  # expm1 keeps precision near the target


def _kl_to_target(logprobs_L: Tensor, rollout_L: Tensor, tokens: LossTokens, options: ObjectiveOptions) -> Tensor:
    target_L = rollout_L if options.kl_against == "rollout" else tokens.reference_logprobs_L
    if target_L is None:
        if options.kl_coef:
            raise ValueError("kl_against is 'reference' and kl_coef is not 0, but there are no reference_logprobs_L")
        return torch.zeros_like(logprobs_L)  # the reference was not scored, because it is not needed
    return kl_terms(logprobs_L - target_L, options.kl_estimator)


def _with_tangent(function: Callable[[Tensor], Tensor], exponent_L: Tensor) -> Tensor:
    """e^x or e^x - 1, continued by its tangent beyond MAX_LOG_RATIO.

    A plain clamp has no gradient there: a bad token that became far more likely would not be pushed back, and k3 would
    push in the wrong direction.
    """
    tangent_L = math.exp(MAX_LOG_RATIO) * (exponent_L - MAX_LOG_RATIO).relu()
    return function(exponent_L.clamp(max=MAX_LOG_RATIO)) + tangent_L


# ---- metrics


@dataclass(frozen=True, eq=False)
class MeasuredTokens:
    """Values per token of a micro, from which the metrics are computed."""

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
    own_logprobs_L: Tensor  # the trainer's before the first update on the batch
    rollout_logprobs_L: Tensor
    log_mismatch_L: Tensor  # own - rollout, bounded so that its exponential's square fits fp32
    is_known_L: Tensor  # the environment sent the engine's logprob
    is_masked_L: Tensor
    teacher_logprobs_L: Tensor | None


@dataclass(frozen=True, eq=False)
class LossStats:
    """Sums and maxima over the tokens of micros. They stay on the device; only `metrics` synchronizes.

    >>> none = LossStats().add(LossStats()).metrics()
    >>> none["loss"], none["mean_ratio"]
    (0.0, nan)
    """

    sum_names: tuple[str, ...] = ()
    maximum_names: tuple[str, ...] = ()
    sums: Tensor = field(default_factory=lambda: torch.zeros(0))
    maxima: Tensor = field(default_factory=lambda: torch.zeros(0))

    def add(self, other: LossStats) -> LossStats:
        """Combine both as if their tokens were in one micro; `LossStats()` is the neutral element."""
        if not self.sum_names or not other.sum_names:
            return self if self.sum_names else other
        return LossStats(
            self.sum_names, self.maximum_names, self.sums + other.sums, torch.maximum(self.maxima, other.maxima)
        )

    def metrics(self) -> dict[str, float]:
        """All metrics by name. Without any token, means are NaN, which is drawn as a gap. Without engine logprobs,
        trainer and engine count as equal: ratios are 1, distances 0."""
        names = (*self.sum_names, *self.maximum_names)
        values = torch.cat([self.sums, self.maxima]).tolist()  # the only synchronization with the device
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
            "loss": total["policy_loss"] + total["kl_loss"],  # the minimized value, with the KL term
            "policy_loss": total["policy_loss"],  # without the KL term
            "kl": mean("kl"),  # the configured estimator against its target, per token
            "entropy": mean("entropy"),  # of the distribution that each token was sampled from
            "mean_ratio": mean("ratio"),  # the ratio that is clipped, per token
            "mean_kl": over_known("rollout_kl"),  # k3 of the current policy against the one that sampled
            "clipped_fraction": clipped_fraction,  # tokens that the surrogate clips
            "clip_ratio/low_mean": mean("clipped_low"),  # of these, with a ratio below the range
            "clip_ratio/high_mean": mean("clipped_high"),  # and above it
            "clip_ratio/region_mean": clipped_fraction,  # clipped_fraction under TRL's name
            "sampling/sampling_logp_difference/mean": over_known("difference"),  # |trainer's - engine's logprob|
            "sampling/sampling_logp_difference/max": total["max_difference"] if num_known else 0.0,
            # trainer's probability before the first update divided by the engine's
            "sampling/importance_sampling_ratio/mean": mean("weight", num_known, empty=1.0),
            "sampling/importance_sampling_ratio/min": _exp_of(-total["max_negated_log_weight"]) if num_known else 1.0,
            "sampling/importance_sampling_ratio/max": _exp_of(total["max_log_weight"]) if num_known else 1.0,
            "rollout_corr/kl": over_known("k1"),  # engine's - trainer's logprob: KL(engine, trainer), unbiased
            "rollout_corr/k3_kl": over_known("k3"),  # the same KL by the non-negative estimator
            "rollout_corr/chi2_token": over_known("chi2"),  # mean squared weight - 1
            "rollout_corr/training_ppl": _exp_of(-over_known("own_logprob")) if num_known else 0.0,  # e^-mean logprob
            "rollout_corr/rollout_ppl": _exp_of(-over_known("rollout_logprob")) if num_known else 0.0,  # the engine's
            # 1 if all importance weights are equal
            "rollout_corr/rollout_is_eff_sample_size": min(effective, 1.0),  # rounding may exceed 1
            "rollout_corr/rollout_is_oob_ratio": over_known("out_of_bounds"),  # weights outside of mask, cap or 0.5..2
            "rollout_corr/rollout_rs_masked_fraction": over_known("masked"),  # tokens without loss because of the mask
            "batch/without_logprobs_frac": 1 - num_known / num_tokens if num_tokens else 0.0,  # engine's were not sent
            "pos_logp": mean("positive_logprob", total["positive"]),  # own logprob of tokens with positive advantage
            "neg_logp": mean("negative_logprob", total["negative"]),  # with negative advantage
            "pos_count": total["positive"],  # number of tokens with positive advantage
            "neg_count": total["negative"],  # with negative advantage
        }
        if "taught" in total:
            found["distill/reverse_kl"] = mean(
                "reverse_kl", total["taught"], math.nan
            )  # policy against teacher, per token
            found["distill/taught_frac"] = mean("taught")  # tokens with a teacher's logprob
        if num_tokens:
            return found
        return {name: value if name in SUM_METRICS else math.nan for name, value in found.items()}


@torch.no_grad()
def measure(tokens: MeasuredTokens, options: ObjectiveOptions) -> LossStats:
    """The sums of one micro, in float64 so that millions of tokens lose no precision."""
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
    if tokens.teacher_logprobs_L is not None:
        over_all["taught"] = ~tokens.teacher_logprobs_L.isnan()
        over_all["reverse_kl"] = reverse_kl(tokens.own_logprobs_L, tokens.teacher_logprobs_L)
    over_known = {
        "rollout_kl": tokens.rollout_kl_L,
        "difference": difference_L.abs(),
        "weight": weight_L,
        "weight_squared": weight_L.square(),
        "k1": -difference_L,
        "k3": torch.expm1(log_weight_L) - log_weight_L,
        "chi2": torch.expm1(2 * log_weight_L),  # weight squared - 1, without cancellation
        "own_logprob": tokens.own_logprobs_L,
        "rollout_logprob": tokens.rollout_logprobs_L,
        "out_of_bounds": outside(weight_L, *_bounds(options)).to(weight_L.dtype),
        "masked": tokens.is_masked_L.to(weight_L.dtype),
    }
    largest = {
        "max_difference": difference_L.abs(), "max_log_weight": log_weight_L, "max_negated_log_weight": -log_weight_L,
    }  # fmt: skip
    # Masks instead of indices: a result whose length depends on values would wait for the device.
    rows = [*over_all.values(), *(row_L.masked_fill(~is_known_L, 0.0) for row_L in over_known.values())]
    maxima = torch.stack([row_L.masked_fill(~is_known_L, -math.inf) for row_L in largest.values()])
    return LossStats(
        (*over_all, *over_known),
        tuple(largest),
        torch.stack([row_L.double() for row_L in rows]).sum(1),
        pad(maxima.double(), (0, 1), value=-math.inf).amax(1),  # padded, so that there is a maximum without tokens
    )


def outside(values_L: Tensor, low: float, high: float) -> Tensor:
    """Which values are outside of [low, high]. A NaN is inside: it must not be masked away."""
    return (values_L < low) | (values_L > high)


def _bounds(options: ObjectiveOptions) -> tuple[float, float]:
    return options.importance_mask or (USUAL_MISMATCH[0], options.importance_cap or USUAL_MISMATCH[1])


def _exp_of(exponent: float) -> float:
    return math.exp(min(exponent, MAX_EXPONENT)) if not math.isnan(exponent) else exponent
