"""Logprobs of chosen tokens in fp32, without the logits of the whole vocabulary ever existing at once.

The output layer is applied to `chunk` entries of the vocabulary at a time, forward and again backward. A softmax over
chunks needs only a running maximum and sum; backward, each chunk's share of the weight gradient is complete in itself.
So memory is tokens * chunk instead of tokens * vocabulary, and nothing of the vocabulary's size is accumulated.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


def chosen_logprobs(
    hidden_LE: Tensor, weight_VE: Tensor, targets_L: Tensor, temperatures_L: Tensor, *, chunk: int
) -> tuple[Tensor, Tensor]:
    """(logprob of each target, entropy of its distribution), both fp32; the entropy carries no gradient."""
    logprobs_L, entropy_L = _ChunkedLogprobs.apply(hidden_LE, weight_VE, targets_L, temperatures_L, chunk)
    return logprobs_L, entropy_L


class _ChunkedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_LE: Tensor, weight_VE: Tensor, targets_L: Tensor, temperatures_L: Tensor, chunk: int
    ) -> tuple[Tensor, Tensor]:
        highest_L = torch.full(targets_L.shape, -torch.inf, device=hidden_LE.device)
        total_L = torch.zeros_like(highest_L)  # sum of exp(logit - highest)
        weighted_L = torch.zeros_like(highest_L)  # sum of exp(logit - highest) * (logit - highest)
        chosen_L = torch.zeros_like(highest_L)
        for columns in _chunks(len(weight_VE), chunk):
            logits = _logits(hidden_LE, weight_VE[columns], temperatures_L)
            rows, places = _targets_within(targets_L, columns)
            chosen_L[rows] = logits[rows, places]
            new_highest_L = torch.maximum(highest_L, logits.amax(-1))
            shift_L = torch.where(total_L > 0, highest_L - new_highest_L, 0.0)  # the first chunk shifts nothing
            weighted_L = (weighted_L + total_L * shift_L) * shift_L.exp()
            total_L = total_L * shift_L.exp()
            logits.sub_(new_highest_L[:, None])
            weights = torch.exp(logits)
            total_L += weights.sum(-1)
            weighted_L += weights.mul_(logits).sum(-1)
            highest_L = new_highest_L
        norms_L = highest_L + total_L.log()
        entropy_L = total_L.log() - weighted_L / total_L
        ctx.save_for_backward(hidden_LE, weight_VE, targets_L, temperatures_L, norms_L)
        ctx.chunk = chunk
        ctx.mark_non_differentiable(entropy_L)
        return chosen_L - norms_L, entropy_L

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        """d logprob / d logits = onehot - softmax, each row scaled by what flows back to it."""
        hidden_LE, weight_VE, targets_L, temperatures_L, norms_L = ctx.saved_tensors
        scale_L = grads[0] / temperatures_L
        d_hidden_LE = torch.zeros(hidden_LE.shape, dtype=torch.float32, device=hidden_LE.device)
        d_weight_VE = torch.empty_like(weight_VE)
        for columns in _chunks(len(weight_VE), ctx.chunk):
            logits = _logits(hidden_LE, weight_VE[columns], temperatures_L)
            d_logits = logits.sub_(norms_L[:, None]).exp_().mul_(-scale_L[:, None])
            rows, places = _targets_within(targets_L, columns)
            d_logits[rows, places] += scale_L[rows]
            d_logits = d_logits.to(hidden_LE.dtype)
            d_hidden_LE += d_logits @ weight_VE[columns]
            torch.mm(d_logits.T, hidden_LE, out=d_weight_VE[columns])
        return d_hidden_LE.to(hidden_LE.dtype), d_weight_VE, None, None, None


def _targets_within(targets_L: Tensor, columns: slice) -> tuple[Tensor, Tensor]:
    """The rows whose target lies in these columns, and its place among them."""
    rows = torch.nonzero((targets_L >= columns.start) & (targets_L < columns.stop)).squeeze(1)
    return rows, targets_L[rows] - columns.start


def _logits(hidden: Tensor, weight: Tensor, temperatures: Tensor) -> Tensor:
    """fp32 logits. bf16 hidden states and weights are multiplied on bf16 units and summed in fp32, which loses nothing;
    a plain bf16 product would round each logit to 8 bits."""
    if hidden.is_cuda:
        logits = torch.mm(hidden, weight.T, out_dtype=torch.float32)
    else:
        with _exact_products_of(hidden.dtype):
            logits = hidden.float() @ weight.float().T
    return logits.div_(temperatures[:, None])


@contextlib.contextmanager
def _exact_products_of(dtype: torch.dtype) -> Iterator[None]:
    if dtype != torch.bfloat16:
        yield
        return
    settings: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = settings.fp32_precision
    settings.fp32_precision = "bf16"
    try:
        yield
    finally:
        settings.fp32_precision = before


def _chunks(length: int, chunk: int) -> Iterator[slice]:
    return (slice(start, min(start + chunk, length)) for start in range(0, length, chunk))
