"""Triton kernels for CUDA, which avoid repeated reads of large tensors.

Each has an equivalent in plain torch; tests on a GPU compare the two.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ROW_BLOCK = 2048
FLAT_BLOCK = 4096


@triton.jit
def _softmax_sums_kernel(
    logits, inverse_temperatures, targets, highest, total, weighted, chosen, first, num_columns, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    scale = tl.load(inverse_temperatures + row)
    high, mass, weight = tl.load(highest + row), tl.load(total + row), tl.load(weighted + row)
    start = logits + row * num_columns
    for block in range(0, num_columns, BLOCK):
        columns = block + tl.arange(0, BLOCK)
        values = tl.load(start + columns, mask=columns < num_columns, other=float("-inf")) * scale
        new_high = tl.maximum(high, tl.max(values, 0))
        shift = tl.where(mass > 0, high - new_high, 0.0)
        factor = tl.exp(shift)
        distance = values - new_high
        terms = tl.exp(distance)
        weight = (weight + mass * shift) * factor + tl.sum(tl.where(columns < num_columns, terms * distance, 0.0), 0)
        mass = mass * factor + tl.sum(terms, 0)
        high = new_high
    tl.store(highest + row, high)
    tl.store(total + row, mass)
    tl.store(weighted + row, weight)
    place = tl.load(targets + row) - first
    if (place >= 0) & (place < num_columns):
        tl.store(chosen + row, tl.load(start + place) * scale)


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
    """Equivalent to logprobs.add_softmax_sums: one read of the logits."""
    _softmax_sums_kernel[(len(logits),)](
        logits, inverse_temperatures_L, targets_L, highest_L, total_L, weighted_L, chosen_L, first, logits.shape[1],
        BLOCK=ROW_BLOCK, num_warps=8,
    )  # fmt: skip


@triton.jit
def _logit_gradients_kernel(
    logits, inverse_temperatures, targets, norms, scales, gradients, first, num_columns, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < num_columns
    values = tl.load(logits + row * num_columns + columns, mask=inside) * tl.load(inverse_temperatures + row)
    probabilities = tl.exp(values - tl.load(norms + row))
    is_target = columns == tl.load(targets + row) - first
    result = tl.load(scales + row) * (tl.where(is_target, 1.0, 0.0) - probabilities)
    tl.store(gradients + row * num_columns + columns, result.to(gradients.dtype.element_ty), mask=inside)


def logit_gradients(
    logits: Tensor,
    inverse_temperatures_L: Tensor,
    targets_L: Tensor,
    first: int,
    norms_L: Tensor,
    scales_L: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """Equivalent to logprobs.logit_gradients: one read of the logits, one write of the gradients."""
    gradients = torch.empty_like(logits, dtype=dtype)
    grid = (len(logits), triton.cdiv(logits.shape[1], ROW_BLOCK))
    _logit_gradients_kernel[grid](
        logits, inverse_temperatures_L, targets_L, norms_L, scales_L, gradients, first, logits.shape[1],
        BLOCK=ROW_BLOCK, num_warps=4,
    )  # fmt: skip
    return gradients


@triton.jit
def _add_kernel(accumulator, gradient, num_elements, BLOCK: tl.constexpr):
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = places < num_elements
    total = tl.load(accumulator + places, mask=inside) + tl.load(gradient + places, mask=inside).to(tl.float32)
    tl.store(accumulator + places, total, mask=inside)


def add_to_fp32(accumulator: Tensor, gradient: Tensor) -> None:
    """accumulator += gradient, for an fp32 sum of bf16 gradients, where torch is slow."""
    num_elements = accumulator.numel()
    gradient = gradient.contiguous()
    _add_kernel[(triton.cdiv(num_elements, FLAT_BLOCK),)](
        accumulator, gradient, num_elements, BLOCK=FLAT_BLOCK, num_warps=8
    )


@triton.jit
def _share_of(codes, LEVELS: tl.constexpr, SQUARINGS: tl.constexpr):
    share = codes / LEVELS
    for _ in tl.static_range(SQUARINGS):
        share = share * share
    return share


@triton.jit
def _to_codes(values, chance, LEVELS: tl.constexpr, SQUARINGS: tl.constexpr):
    """Magnitudes of one block per row -> (codes, peaks), rounded up or down at random; see adamw_8bit.py."""
    peaks = tl.max(values, 1)
    share = values / tl.maximum(peaks, 1.1754944e-38)[:, None]
    low = share
    for _ in tl.static_range(SQUARINGS):
        low = tl.sqrt(low)
    low = tl.minimum(tl.floor(low * LEVELS), LEVELS - 1)
    below, above = _share_of(low, LEVELS, SQUARINGS), _share_of(low + 1, LEVELS, SQUARINGS)
    return tl.where(share - below > chance * (above - below), low + 1, low), peaks


@triton.jit
def _move_8bit_kernel(
    weights, gradients, mean_codes, mean_peaks, square_codes, square_peaks, num_elements, num_blocks, seed,
    beta1, beta2, rate, decay, root_correction, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    blocks = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    places = blocks[:, None].to(tl.int64) * BLOCK + tl.arange(0, BLOCK)[None, :]
    is_block, inside = blocks < num_blocks, places < num_elements
    stored = is_block[:, None] & (places >= 0)
    drawn = places.to(tl.int32)
    fresh = tl.load(gradients + places, mask=inside, other=0.0).to(tl.float32)
    codes = tl.load(mean_codes + places, mask=stored, other=0).to(tl.float32)
    peaks = tl.load(mean_peaks + blocks, mask=is_block, other=0.0)[:, None]
    mean = _share_of(tl.abs(codes), 127, 1) * peaks
    mean = tl.where(codes < 0, -mean, mean) * beta1 + fresh * (1 - beta1)
    codes = tl.load(square_codes + places, mask=stored, other=0).to(tl.float32)
    peaks = tl.load(square_peaks + blocks, mask=is_block, other=0.0)[:, None]
    square = _share_of(codes, 255, 2) * peaks * beta2 + fresh * fresh * (1 - beta2)

    codes, peaks_B = _to_codes(tl.abs(mean), tl.rand(seed, drawn), 127, 1)
    tl.store(mean_codes + places, tl.where(mean < 0, -codes, codes).to(tl.int8), mask=stored)
    tl.store(mean_peaks + blocks, peaks_B, mask=is_block)
    codes, peaks_B = _to_codes(square, tl.rand(seed + 1, drawn), 255, 2)
    tl.store(square_codes + places, codes.to(tl.uint8), mask=stored)
    tl.store(square_peaks + blocks, peaks_B, mask=is_block)

    moved = tl.load(weights + places, mask=inside, other=0.0).to(tl.float32) * decay
    moved = moved - rate * mean / (tl.sqrt(square) * root_correction + 1e-8)
    if weights.dtype.element_ty == tl.bfloat16:
        noise = tl.randint(seed + 2, drawn) & 0xFFFF
        bits = (moved.to(tl.int32, bitcast=True) + noise.to(tl.int32)) & -65536
        moved = bits.to(tl.float32, bitcast=True)
    tl.store(weights + places, moved.to(weights.dtype.element_ty), mask=inside)


def adamw_8bit_update(
    weights: Tensor,
    gradient: Tensor,
    mean: tuple[Tensor, Tensor],
    square: tuple[Tensor, Tensor],
    *,
    seed: int,
    betas: tuple[float, float],
    rate: float,
    decay: float,
    num_moves: int,
) -> None:
    """Equivalent to AdamW8bit._move_chunk: moments (codes, peaks), weights and all roundings in one pass."""
    rows, block = 4, mean[0].shape[1]
    num_blocks = len(mean[0])
    _move_8bit_kernel[(triton.cdiv(num_blocks, rows),)](
        weights, gradient, *mean, *square, weights.numel(), num_blocks, seed, *betas,
        rate / (1 - betas[0] ** num_moves), decay, (1 - betas[1] ** num_moves) ** -0.5,
        ROWS=rows, BLOCK=block, num_warps=4,
    )  # fmt: skip
