"""Logprobs of chosen tokens in fp32, without the logits of the whole vocabulary ever existing at once.

The output layer is applied to `chunk` entries of the vocabulary at a time, forward and again backward. A softmax over
chunks needs only a running maximum and sum; backward, each chunk's share of the weight gradient is complete in itself.
So memory is tokens * chunk instead of tokens * vocabulary, and nothing of the vocabulary's size is accumulated.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from treadle.train import softmax


def chosen_logprobs(
    hidden_LE: Tensor, weight_VE: Tensor, targets_L: Tensor, temperatures_L: Tensor, *, chunk: int
) -> tuple[Tensor, Tensor]:
    """(logprob of each target, entropy of its distribution), both fp32; the entropy carries no gradient."""
    logprobs_L, entropy_L = _ChunkedLogprobs.apply(hidden_LE, weight_VE, targets_L, temperatures_L.reciprocal(), chunk)
    return logprobs_L, entropy_L


class _ChunkedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_LE: Tensor, weight_VE: Tensor, targets_L: Tensor, inverse_L: Tensor, chunk: int
    ) -> tuple[Tensor, Tensor]:
        highest_L = torch.full(targets_L.shape, -torch.inf, device=hidden_LE.device)
        total_L = torch.zeros_like(highest_L)
        weighted_L = torch.zeros_like(highest_L)
        chosen_L = torch.zeros_like(highest_L)
        add = _kernels(hidden_LE.device).add_softmax_sums
        multiply = _Product(hidden_LE)
        for columns in _chunks(len(weight_VE), chunk):
            logits = multiply(weight_VE[columns])
            add(logits, inverse_L, targets_L, columns.start, highest_L, total_L, weighted_L, chosen_L)
        norms_L = highest_L + total_L.log()
        entropy_L = total_L.log() - weighted_L / total_L
        ctx.save_for_backward(hidden_LE, weight_VE, targets_L, inverse_L, norms_L)
        ctx.chunk = chunk
        ctx.mark_non_differentiable(entropy_L)
        return chosen_L - norms_L, entropy_L

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None, None, None]:
        """d logprob / d logits = onehot - softmax, each row scaled by what flows back to it."""
        hidden_LE, weight_VE, targets_L, inverse_L, norms_L = ctx.saved_tensors
        scales_L = grads[0] * inverse_L
        d_hidden_LE = torch.zeros(hidden_LE.shape, dtype=torch.float32, device=hidden_LE.device)
        d_weight_VE = torch.empty_like(weight_VE) if ctx.needs_input_grad[1] else None
        gradients = _kernels(hidden_LE.device).logit_gradients
        multiply = _Product(hidden_LE)
        for columns in _chunks(len(weight_VE), ctx.chunk):
            logits = multiply(weight_VE[columns])
            d_logits = gradients(logits, inverse_L, targets_L, columns.start, norms_L, scales_L, hidden_LE.dtype)
            d_hidden_LE += d_logits @ weight_VE[columns]
            if d_weight_VE is not None:
                torch.mm(d_logits.T, hidden_LE, out=d_weight_VE[columns])
        return d_hidden_LE.to(hidden_LE.dtype), d_weight_VE, None, None, None


def _kernels(device: torch.device) -> Any:
    """Fused kernels on CUDA, where torch comes with Triton; else their plain twins."""
    if device.type == "cuda" and importlib.util.find_spec("triton"):
        from treadle.train import kernels

        return kernels
    return softmax


class _Product:
    """fp32 logits of one chunk after another. bf16 hidden states and weights are multiplied on bf16 units and summed in
    fp32, which loses nothing; a plain bf16 product would round each logit to 8 bits.

    On a CPU the memory of the chunk before is used again: to get it anew from the system costs as much as the product.
    """

    def __init__(self, hidden_LE: Tensor) -> None:
        self._hidden = hidden_LE if hidden_LE.is_cuda else hidden_LE.float()
        self._dtype = hidden_LE.dtype
        self._logits: Tensor | None = None

    def __call__(self, weight: Tensor) -> Tensor:
        if self._dtype == torch.float32:
            return self._hidden @ weight.T
        if self._hidden.is_cuda:
            return torch.mm(self._hidden, weight.T, out_dtype=torch.float32)
        shape = (len(self._hidden), len(weight))
        if self._logits is None or self._logits.shape != shape:
            self._logits = torch.empty(shape)
        with _exact_products_of(self._dtype):
            return torch.mm(self._hidden, weight.float().T, out=self._logits)


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
