"""The objective, pure and in fp32: what the tokens of one micro add to the loss of the step.

    loss = sum over tokens of  weight * (policy term + kl_coef * KL estimate)

Nothing is divided by a count here: the weights hold each token's share in the step, so that the losses of micros add up
to the loss of the step however it is split. What each setting means to a user is told in docs/objectives.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from treadle.config.train import ObjectiveOptions
from treadle.train.loss_stats import MeasuredTokens, Stats, measure, outside

# Where exponentials end: e^20 is 5e8, far beyond any ratio that could still mean something, and its square times any
# weight still fits fp32. So no inf can arise, and no inf * 0, which would be NaN and cost the whole step.
MAX_LOG_RATIO = 20.0


@dataclass(frozen=True, eq=False)
class LossTokens:
    """The tokens of one micro that carry loss. `_L`: one value per token, fp32, without gradient.

    All tokens of a sequence that carry loss are in the same micro: the ratio of a sequence is made of all of them.
    """

    rollout_logprobs_L: Tensor  # the engine's; NaN: none was sent, the token counts as sampled from the old policy
    old_logprobs_L: Tensor | None  # the trainer's own before the batch's first update; None: the ones being scored
    reference_logprobs_L: Tensor | None  # of the model that training began with; for kl_against "reference"
    advantages_L: Tensor
    weights_L: Tensor  # the token's share in the mean over the step
    sequences_L: Tensor  # long: which sequence of the micro the token belongs to
    num_sequences: int


def policy_loss(
    logprobs_L: Tensor, entropy_L: Tensor, tokens: LossTokens, options: ObjectiveOptions
) -> tuple[Tensor, Stats]:
    """The micro's part of the loss, with a gradient through `logprobs_L` alone, and of the metrics.

    A token that became three times likelier although it was bad costs 3, and is pushed down:

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
    is_masked_L = outside(mismatch_L, options.importance_mask_low, options.importance_mask_high)

    old_L = rollout_L if options.old_logprobs == "rollout" else own_L
    ratio_L = importance_ratio(logprobs_L - old_L, tokens, options.ratio)
    policy_L = policy_terms(ratio_L, logprobs_L, tokens.advantages_L, options)
    if options.importance_cap is not None:
        policy_L = policy_L * mismatch_L.clamp(max=options.importance_cap)
    kl_L = _kl_to_target(logprobs_L, rollout_L, tokens, options)

    weighted_policy_L = tokens.weights_L * policy_L.masked_fill(is_masked_L, 0.0)
    # A distance that is merely reported may be infinite; times a coefficient of 0 it must still be 0.
    weighted_kl_L = torch.zeros_like(kl_L)
    if options.kl_coef:
        weighted_kl_L = options.kl_coef * tokens.weights_L * kl_L.masked_fill(is_masked_L, 0.0)
    with torch.no_grad():
        is_low_L, is_high_L = clipped(ratio_L, tokens.advantages_L, options)
        measured = MeasuredTokens(
            policy_loss_L=weighted_policy_L,
            kl_loss_L=weighted_kl_L,
            logprobs_L=logprobs_L,
            entropy_L=entropy_L,
            advantages_L=tokens.advantages_L,
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
        )
    loss = weighted_policy_L.sum()
    if options.kl_coef:
        loss = loss + weighted_kl_L.sum()
    return loss, measure(measured, options)


def importance_ratio(log_ratio_L: Tensor, tokens: LossTokens, kind: str) -> Tensor:
    """How much likelier each token became ("token"), or its sequence: per token ("sequence_mean") or all of it."""
    if kind == "token":
        return _exp(log_ratio_L)
    empty_S = log_ratio_L.new_zeros(tokens.num_sequences)
    where = (tokens.sequences_L,)
    # index_put adds in a fixed order on a GPU, index_add does not, and the same seed is to give the same run
    log_ratio_S = empty_S.index_put(where, log_ratio_L, accumulate=True)
    if kind == "sequence_mean":
        lengths_S = empty_S.index_put(where, torch.ones_like(log_ratio_L), accumulate=True)
        log_ratio_S = log_ratio_S / lengths_S.clamp(min=1)
    return _exp(log_ratio_S)[tokens.sequences_L]


def policy_terms(ratio_L: Tensor, logprobs_L: Tensor, advantages_L: Tensor, options: ObjectiveOptions) -> Tensor:
    """What each token costs, before weights.

    "clip": for both signs of the advantage the smaller of the clipped and the unclipped gain counts, so a token never
    gains by moving further out, and a bad one that became likelier is always pushed back.
    "cispo": a weighted logprob. The clipped ratio is a mere weight, so even a clipped token has a gradient.
    """
    if options.surrogate == "cispo":
        return -ratio_L.detach().clamp(max=1 + options.clip_high) * advantages_L * logprobs_L
    inside_L = ratio_L.clamp(1 - options.clip_low, 1 + options.clip_high)
    gain_L = torch.minimum(ratio_L * advantages_L, inside_L * advantages_L)
    if options.dual_clip is not None:
        gain_L = torch.where(advantages_L < 0, torch.maximum(gain_L, options.dual_clip * advantages_L), gain_L)
    return -gain_L


def clipped(ratio_L: Tensor, advantages_L: Tensor, options: ObjectiveOptions) -> tuple[Tensor, Tensor]:
    """Which tokens the surrogate cuts off because their ratio is too low, and which because it is too high."""
    if options.surrogate == "cispo":
        return torch.zeros_like(ratio_L, dtype=torch.bool), ratio_L > 1 + options.clip_high
    is_low_L = (ratio_L < 1 - options.clip_low) & (advantages_L < 0)
    is_high_L = (ratio_L > 1 + options.clip_high) & (advantages_L > 0)
    if options.dual_clip is not None:
        is_high_L = is_high_L | ((ratio_L > options.dual_clip) & (advantages_L < 0))
    return is_low_L, is_high_L


def kl_terms(log_ratio_L: Tensor, estimator: str) -> Tensor:
    """An estimate of KL(policy, target) from each token's log of policy over target.

    >>> [round(kl_terms(torch.tensor(0.5), estimator).item(), 6) for estimator in ("k1", "k2", "k3")]
    [0.5, 0.125, 0.106531]
    """
    if estimator == "k1":
        return log_ratio_L
    if estimator == "k2":
        return log_ratio_L.square() / 2
    return _expm1(-log_ratio_L) + log_ratio_L  # expm1: near the target, e^x - 1 would leave few digits of the result


def _kl_to_target(logprobs_L: Tensor, rollout_L: Tensor, tokens: LossTokens, options: ObjectiveOptions) -> Tensor:
    target_L = rollout_L if options.kl_against == "rollout" else tokens.reference_logprobs_L
    if target_L is None:
        if options.kl_coef:
            raise ValueError("kl_against is 'reference' and kl_coef is not 0, but there are no reference_logprobs_L")
        return torch.zeros_like(logprobs_L)  # nobody asked how far the reference is, so nobody scored it
    return kl_terms(logprobs_L - target_L, options.kl_estimator)


def _exp(exponent_L: Tensor) -> Tensor:
    """e^x, past MAX_LOG_RATIO continued by its tangent.

    A plain clamp would have no gradient there: a bad token that became vastly likelier would no longer be pushed back,
    and k3 would even push the wrong way.
    """
    return exponent_L.clamp(max=MAX_LOG_RATIO).exp() + _tangent(exponent_L)


def _expm1(exponent_L: Tensor) -> Tensor:
    return exponent_L.clamp(max=MAX_LOG_RATIO).expm1() + _tangent(exponent_L)


def _tangent(exponent_L: Tensor) -> Tensor:
    return math.exp(MAX_LOG_RATIO) * (exponent_L - MAX_LOG_RATIO).relu()
