"""The objective: clipped policy gradient with an optional KL term. Pure, in fp32, summed over tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LossConfig:
    clip_low: float = 0.2
    clip_high: float = 0.28
    kl_coef: float = 0.0


def policy_loss(
    logprobs_T: Tensor, rollout_logprobs_T: Tensor, advantages_T: Tensor, config: LossConfig
) -> tuple[Tensor, dict[str, float]]:
    """The sum over tokens of the clipped objective, and sums for the metrics.

    For both signs of the advantage the smaller of the clipped and unclipped gain counts, so a token can never gain by
    moving further out, and a bad token that became likelier is always pushed back:

    >>> loss, _ = policy_loss(torch.tensor([3.0]).log(), torch.zeros(1), torch.tensor([-1.0]), LossConfig())
    >>> round(loss.item(), 4)
    3.0
    """
    log_ratio_T = logprobs_T - rollout_logprobs_T
    ratio_T = torch.exp(log_ratio_T)
    clipped_T = ratio_T.clamp(1 - config.clip_low, 1 + config.clip_high)
    gain_T = torch.minimum(ratio_T * advantages_T, clipped_T * advantages_T)
    loss = -gain_T.sum()
    # k3: unbiased, never negative, small variance; against the policy that the tokens were sampled from
    kl_T = torch.exp(-log_ratio_T) + log_ratio_T - 1
    if config.kl_coef:
        loss = loss + config.kl_coef * kl_T.sum()
    with torch.no_grad():
        is_clipped_T = gain_T < ratio_T * advantages_T
        sums = {
            "tokens": float(len(ratio_T)),
            "policy": float(-gain_T.sum()),
            "ratio": float(ratio_T.sum()),
            "clipped": float(is_clipped_T.sum()),
            "kl": float(kl_T.sum()),
            "abs_diff": float(log_ratio_T.abs().sum()),
        }
    return loss, sums
