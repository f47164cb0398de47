"""Sample tokens by inverse CDF: one distribution and one uniform number per row.

The uniform numbers belong to the sequence, not to the batch, so the tokens of a seed do not depend on which other
requests run at the same time.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

BLOCK = 256  # the vocabulary is searched in blocks: a cumulative sum over 50,000 entries per row is ten times slower


@dataclass(frozen=True)
class SamplingParams:
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0

    @property
    def truncates(self) -> bool:
        return self.temperature > 0 and (self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0)


def uniforms(seed: int | None, sequence: int, count: int) -> np.ndarray:
    """The uniform numbers of one sequence, from a counter-based generator keyed by (seed, sequence).

    >>> bool((uniforms(7, 0, 4) == uniforms(7, 0, 8)[:4]).all())
    True
    """
    key = int.from_bytes(os.urandom(8), "big") if seed is None else seed & (2**64 - 1)
    return np.random.Generator(np.random.Philox(key=[key, sequence])).random(count)


def sample(logits_BV: Tensor, params: list[SamplingParams], uniform_B: Tensor) -> tuple[Tensor, Tensor]:
    """Sample token ids; returns them with their logprobs under the distribution they were sampled from.

    Temperature 0 takes the most likely token and reports its logprob at temperature 1.
    """
    logits_BV = _processed(logits_BV, params)
    highest_B, likeliest_B = logits_BV.max(-1)
    weights_BV = torch.exp(logits_BV - highest_B[:, None])
    sampled_B, total_B = _inverse_cdf(weights_BV, uniform_B)
    greedy_B = torch.tensor([p.temperature == 0 for p in params], device=logits_BV.device)
    tokens_B = torch.where(greedy_B, likeliest_B, sampled_B)
    logprobs_B = logits_BV.gather(1, tokens_B[:, None]).squeeze(1) - highest_B - torch.log(total_B)
    return tokens_B, logprobs_B


def token_logprobs(
    logits_BV: Tensor, params: list[SamplingParams], tokens_B: Tensor, *, num_top: int, raw: bool
) -> tuple[Tensor, list[dict[int, float]]]:
    """Logprobs of `tokens_B`, and per row {token id: logprob} of the top tokens, most likely first.

    Under the distribution that was sampled from (tokens removed by truncation are omitted), or, with `raw`, under the
    model's own at temperature 1.
    """
    logprobs_BV = torch.log_softmax(logits_BV.float() if raw else _processed(logits_BV, params), -1)
    top_BK = logprobs_BV.topk(min(num_top, logprobs_BV.shape[-1]), -1)
    tops = [
        {token: logprob for token, logprob in zip(ids, logprobs, strict=True) if logprob > -np.inf}
        for ids, logprobs in zip(top_BK.indices.tolist(), top_BK.values.tolist(), strict=True)
    ]
    return logprobs_BV.gather(1, tokens_B[:, None]).squeeze(1), tops


def _processed(logits_BV: Tensor, params: list[SamplingParams]) -> Tensor:
    """Logits divided by the temperature, and -inf where truncation removes a token."""
    logits_BV = logits_BV.float()
    temperature_B = torch.tensor([p.temperature or 1.0 for p in params], device=logits_BV.device)
    if not bool((temperature_B == 1.0).all()):
        logits_BV = logits_BV / temperature_B[:, None]
    return _truncate(logits_BV, params) if any(p.truncates for p in params) else logits_BV


def _inverse_cdf(weights_BV: Tensor, uniform_B: Tensor) -> tuple[Tensor, Tensor]:
    """For each row, the first token at which the cumulative sum of weights exceeds uniform * total; and the total."""
    num_rows, num_tokens = weights_BV.shape
    if num_tokens % BLOCK:
        weights_BV = torch.nn.functional.pad(weights_BV, (0, BLOCK - num_tokens % BLOCK))
    blocks = weights_BV.view(num_rows, -1, BLOCK)
    block_sums = blocks.sum(-1)
    running = block_sums.double().cumsum(-1)
    total_B = running[:, -1]
    target_B = uniform_B.double() * total_B
    block_B = (running <= target_B[:, None]).sum(-1).clamp_(max=running.shape[1] - 1)
    rows = torch.arange(num_rows, device=weights_BV.device)
    rest_B = target_B - (running[rows, block_B] - block_sums[rows, block_B])
    chosen = blocks[rows, block_B]
    place_B = (chosen.double().cumsum(-1) <= rest_B[:, None]).sum(-1).clamp_(max=BLOCK - 1)
    # Rounding can select a token of weight zero (truncated, or padding): use the block's most likely one instead.
    impossible_B = chosen[rows, place_B] == 0
    place_B = torch.where(impossible_B, chosen.argmax(-1), place_B)
    return block_B * BLOCK + place_B, total_B.float()


def _truncate(logits_BV: Tensor, params: list[SamplingParams]) -> Tensor:
    """Set the logits that top-k, top-p and min-p remove to -inf, row by row."""
    logits_BV = logits_BV.clone()
    for row, p in enumerate(params):
        if not p.truncates:
            continue
        logits_V = logits_BV[row]
        if p.top_k > 0:
            floor = torch.topk(logits_V, min(p.top_k, len(logits_V))).values[-1]
            logits_V[logits_V < floor] = -torch.inf
        if p.min_p > 0:
            logits_V[logits_V < logits_V.max() + float(np.log(p.min_p))] = -torch.inf
        if p.top_p < 1:
            ordered, order = torch.softmax(logits_V, -1).sort(descending=True)
            beyond = ordered.cumsum(-1) - ordered >= p.top_p
            logits_V[order[beyond]] = -torch.inf
    return logits_BV
