"""Compute logprobs of chosen tokens in fp32 without materializing the logits of the whole vocabulary.

The output layer is applied to `chunk` entries of the vocabulary at a time, forward and again backward. A softmax over
chunks needs only a running maximum and sum; backward, each chunk's part of the weight gradient is complete. So memory
is tokens * chunk instead of tokens * vocabulary.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

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
    """Add the columns from `first` on to the running sums, in place; overwrites the logits.

    z = logit / temperature; total = sum of exp(z - highest), weighted = sum of exp(z - highest) * (z - highest).
    """
    _divide(logits, inverse_temperatures_L)
    rows, columns = _targets_within(targets_L, first, logits.shape[1])
    chosen_L[rows] = logits[rows, columns]
    new_highest_L = torch.maximum(highest_L, logits.amax(-1))
    shift_L = torch.where(total_L > 0, highest_L - new_highest_L, 0.0)  # 0 for the first chunk
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
    """scale * (onehot - softmax) for the columns from `first` on; overwrites the logits."""
    _divide(logits, inverse_temperatures_L)
    gradients = logits.sub_(norms_L[:, None]).exp_().mul_(-scales_L[:, None])
    rows, columns = _targets_within(targets_L, first, logits.shape[1])
    gradients[rows, columns] += scales_L[rows]
    return gradients.to(dtype)


def _divide(logits: Tensor, inverse_temperatures_L: Tensor) -> None:
    """Divide by the temperatures, in place; if all are 1, a pass over the logits is saved."""
    if logits.is_cuda or not bool((inverse_temperatures_L == 1).all()):  # on a GPU the check would synchronize
        logits.mul_(inverse_temperatures_L[:, None])


def _targets_within(targets_L: Tensor, first: int, num_columns: int) -> tuple[Tensor, Tensor]:
    """Rows whose target is in these columns, and its index among them."""
    rows = torch.nonzero((targets_L >= first) & (targets_L < first + num_columns)).squeeze(1)
    return rows, targets_L[rows] - first


def chosen_logprobs(
    hidden_LE: Tensor, weight_VE: Tensor, targets_L: Tensor, temperatures_L: Tensor, *, chunk: int
) -> tuple[Tensor, Tensor]:
    """(logprob of each target, entropy of its distribution), both fp32; the entropy has no gradient."""
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
        add, _ = _softmax_functions(hidden_LE.device)
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
        """d logprob / d logits = onehot - softmax, each row scaled by its incoming gradient."""
        hidden_LE, weight_VE, targets_L, inverse_L, norms_L = ctx.saved_tensors
        scales_L = grads[0] * inverse_L
        d_hidden_LE = torch.zeros(hidden_LE.shape, dtype=torch.float32, device=hidden_LE.device)
        d_weight_VE = torch.empty_like(weight_VE) if ctx.needs_input_grad[1] else None
        _, gradients = _softmax_functions(hidden_LE.device)
        multiply = _Product(hidden_LE)
        for columns in _chunks(len(weight_VE), ctx.chunk):
            logits = multiply(weight_VE[columns])
            d_logits = gradients(logits, inverse_L, targets_L, columns.start, norms_L, scales_L, hidden_LE.dtype)
            d_hidden_LE += d_logits @ weight_VE[columns]
            if d_weight_VE is not None:
                torch.mm(d_logits.T, hidden_LE, out=d_weight_VE[columns])
        return d_hidden_LE.to(hidden_LE.dtype), d_weight_VE, None, None, None


def _softmax_functions(device: torch.device) -> tuple[Callable[..., None], Callable[..., Tensor]]:
    """(add_softmax_sums, logit_gradients): Triton kernels on CUDA if Triton is installed, else the functions above."""
    if device.type == "cuda" and importlib.util.find_spec("triton"):
        from treadle.train import kernels

        return kernels.add_softmax_sums, kernels.logit_gradients
    return add_softmax_sums, logit_gradients


class _Product:
    """fp32 logits of one chunk after another. bf16 hidden states and weights are multiplied on bf16 units and summed in
    fp32, which is exact; a plain bf16 product would round each logit to 8 bits.

    On a CPU the memory of the previous chunk is reused: allocating it costs as much as the product.
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
