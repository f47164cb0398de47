"""A softmax over a vocabulary that comes in chunks of columns: the running sums, and the gradient. Pure."""

from __future__ import annotations

import torch
from torch import Tensor


def add_softmax_sums(
    logits: Tensor,
    inverse_temperatures_L: Tensor,
    targets_L: Tensor,
    first: int,
    highest_L: Tensor,
    total_L: Tensor,
    weighted_L: Tensor,
    chosen_L: Tensor,
) -> None:
    """Take the columns from `first` on into the running sums, in place; the logits are used up.

    z = logit / temperature; total = sum of exp(z - highest), weighted = sum of exp(z - highest) * (z - highest).
    """
    _divide(logits, inverse_temperatures_L)
    rows, places = _targets_within(targets_L, first, logits.shape[1])
    chosen_L[rows] = logits[rows, places]
    new_highest_L = torch.maximum(highest_L, logits.amax(-1))
    shift_L = torch.where(total_L > 0, highest_L - new_highest_L, 0.0)  # the first chunk shifts nothing
    factor_L = shift_L.exp()
    weighted_L.add_(total_L * shift_L).mul_(factor_L)
    total_L.mul_(factor_L)
    distances = logits.sub_(new_highest_L[:, None])
    terms = torch.exp(distances)
    total_L += terms.sum(-1)
    weighted_L += distances.mul_(terms).sum(-1)
    highest_L.copy_(new_highest_L)


def logit_gradients(
    logits: Tensor,
    inverse_temperatures_L: Tensor,
    targets_L: Tensor,
    first: int,
    norms_L: Tensor,
    scales_L: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """scale * (onehot - softmax) for the columns from `first` on; the logits are used up."""
    _divide(logits, inverse_temperatures_L)
    gradients = logits.sub_(norms_L[:, None]).exp_().mul_(-scales_L[:, None])
    rows, places = _targets_within(targets_L, first, logits.shape[1])
    gradients[rows, places] += scales_L[rows]
    return gradients.to(dtype)


def _divide(logits: Tensor, inverse_temperatures_L: Tensor) -> None:
    """By the temperatures, in place; most often they are 1, and a pass over the logits is saved."""
    if logits.is_cuda or not bool((inverse_temperatures_L == 1).all()):  # to look would make a GPU wait
        logits.mul_(inverse_temperatures_L[:, None])


def _targets_within(targets_L: Tensor, first: int, num_columns: int) -> tuple[Tensor, Tensor]:
    """The rows whose target lies in these columns, and its place among them."""
    rows = torch.nonzero((targets_L >= first) & (targets_L < first + num_columns)).squeeze(1)
    return rows, targets_L[rows] - first
