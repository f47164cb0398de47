"""Attention over packed groups: each completion sees the group's prompt and itself, and nothing else.

Written with dense batched products over (group, completion) blocks instead of a mask over the whole row: for G
completions of C tokens behind P prompt tokens it costs G*C*(P+C), not (P+G*C)^2. On a CPU this is several times
faster than a masked scaled_dot_product_attention, above all backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from treadle.train.pack import Segment

ATTENTION = "treadle_packed"


FORBIDDEN = -1e30  # finite, so that a row of padding gives numbers (which nobody reads), not NaN


@dataclass(frozen=True)
class Blocks:
    """Where packed tokens stand in the padded blocks, and back.

    N groups, P the longest prompt, G the most completions, C the longest completion of a micro.
    """

    num_root: int  # the first columns of every prompt are the tokens that all groups begin with
    prompt_NP: Tensor  # index into T; padding points at token 0
    completion_NGC: Tensor
    is_query_NP: Tensor  # real tokens; those of the root count in the first group only
    is_query_NGC: Tensor
    prompt_bias: Tensor  # [N, 1, 1, P, P], added to scores: causal, and no padding as key
    completion_bias: Tensor  # [N, 1, 1, C, P + C]
    back_T: Tensor  # index into the rows of all prompt blocks followed by those of all completion blocks


def lay_out(segments: Sequence[Segment], device: torch.device) -> Blocks:
    """Plan the blocks of a micro once; every layer uses them."""
    num_groups = len(segments)
    root = segments[0].root
    num_root = root[1] - root[0]
    longest_prompt = max(1, *(num_root + s.prompt[1] - s.prompt[0] for s in segments))  # one column at least
    most = max(len(s.completions) for s in segments)
    longest = max(end - start for s in segments for start, end in s.completions)
    prompt = torch.zeros(num_groups, longest_prompt, dtype=torch.long)
    is_prompt = torch.zeros(num_groups, longest_prompt, dtype=torch.bool)
    prompt[:, :num_root] = torch.arange(*root)
    is_prompt[:, :num_root] = True
    completion = torch.zeros(num_groups, most, longest, dtype=torch.long)
    is_completion = torch.zeros(num_groups, most, longest, dtype=torch.bool)
    back = torch.zeros(segments[-1].completions[-1][1], dtype=torch.long)
    back[root[0] : root[1]] = torch.arange(num_root)
    for n, segment in enumerate(segments):
        start, end = segment.prompt
        columns = torch.arange(num_root, num_root + end - start)
        prompt[n, columns] = torch.arange(start, end)
        is_prompt[n, columns] = True
        back[start:end] = n * longest_prompt + columns
        for g, (start, end) in enumerate(segment.completions):
            completion[n, g, : end - start] = torch.arange(start, end)
            is_completion[n, g, : end - start] = True
            first_row = num_groups * longest_prompt + (n * most + g) * longest
            back[start:end] = first_row + torch.arange(end - start)
    no_padding = torch.where(is_prompt, 0.0, FORBIDDEN)[:, None, None, None, :]
    own = _causal(longest).expand(num_groups, 1, 1, -1, -1)
    is_query = is_prompt.clone()
    is_query[1:, :num_root] = False
    return Blocks(
        num_root=num_root,
        prompt_NP=prompt.to(device),
        completion_NGC=completion.to(device),
        is_query_NP=is_query.to(device),
        is_query_NGC=is_completion.to(device),
        prompt_bias=(no_padding + _causal(longest_prompt)).to(device),
        completion_bias=torch.cat([no_padding.expand(-1, -1, -1, longest, -1), own], -1).to(device),
        back_T=back.to(device),
    )


class PackedAttention(torch.autograd.Function):
    """query [T, heads, D], key and value [T, kv heads, D] -> [T, heads, D]; fp32 inside.

    Every packed token stands in one block (the root in all of them, of which the first counts), so going to blocks and
    coming back are plain gathers, forward and backward; nothing is scattered. R query heads share a kv head: they are
    rows of the same product.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, blocks: Blocks, scaling: float) -> Tensor:
        num_kv = key.shape[1]
        q_prompt, q_own = _to_blocks(query, blocks, num_kv)
        k_prompt, k_own = _to_blocks(key, blocks, num_kv)
        v_prompt, v_own = _to_blocks(value, blocks, num_kv)
        prompt_probs = _softmax(q_prompt @ k_prompt.mT, blocks.prompt_bias, scaling)
        shared_scores = (q_own.flatten(2, 3) @ k_prompt.mT).view(*q_own.shape[:-1], -1)
        probs = _softmax(torch.cat([shared_scores, q_own @ k_own.mT], -1), blocks.completion_bias, scaling)
        shared_probs, own_probs = probs.split([k_prompt.shape[2], k_own.shape[3]], -1)
        out_own = (shared_probs.flatten(2, 3) @ v_prompt).view(q_own.shape) + own_probs @ v_own
        ctx.save_for_backward(query, key, value, prompt_probs, probs)
        ctx.blocks, ctx.scaling = blocks, scaling
        return _from_blocks(prompt_probs @ v_prompt, out_own, blocks, query)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        query, key, value, prompt_probs, probs = ctx.saved_tensors
        blocks: Blocks = ctx.blocks
        num_kv = key.shape[1]
        q_prompt, q_own = _to_blocks(query, blocks, num_kv)
        k_prompt, k_own = _to_blocks(key, blocks, num_kv)
        v_prompt, v_own = _to_blocks(value, blocks, num_kv)
        d_prompt, d_own = _to_blocks(grads[0], blocks, num_kv, queries_only=True)
        sizes = [k_prompt.shape[2], k_own.shape[3]]

        shared_probs, own_probs = probs.split(sizes, -1)
        d_v_prompt = prompt_probs.mT @ d_prompt + shared_probs.flatten(2, 3).mT @ d_own.flatten(2, 3)
        d_v_own = own_probs.mT @ d_own

        d_prompt_scores = _softmax_backward(prompt_probs, d_prompt @ v_prompt.mT, ctx.scaling)
        d_shared = (d_own.flatten(2, 3) @ v_prompt.mT).view(*d_own.shape[:-1], -1)
        d_scores = _softmax_backward(probs, torch.cat([d_shared, d_own @ v_own.mT], -1), ctx.scaling)
        d_shared_scores, d_own_scores = d_scores.split(sizes, -1)
        d_shared_rows = d_shared_scores.flatten(2, 3)

        d_q_own = (d_shared_rows @ k_prompt).view(q_own.shape) + d_own_scores @ k_own
        d_k_prompt = d_prompt_scores.mT @ q_prompt + d_shared_rows.mT @ q_own.flatten(2, 3)
        return (
            _from_blocks(d_prompt_scores @ k_prompt, d_q_own, blocks, query),
            _from_blocks(_sum_root(d_k_prompt, blocks), d_own_scores.mT @ q_own, blocks, key),
            _from_blocks(_sum_root(d_v_prompt, blocks), d_v_own, blocks, value),
            None,
            None,
        )


class PackedContext:
    """What the attention needs to know of the micro that is being forwarded."""

    def __init__(self) -> None:
        self.blocks: Blocks | None = None


def plug_in(model: Any, context: PackedContext) -> None:
    """Make `model` attend by `context`, through transformers' public attention interface."""

    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, *, scaling: float, **_: Any
    ) -> tuple[Tensor, None]:
        rows = [x[0].transpose(0, 1) for x in (query, key, value)]  # [1, heads, T, D] -> [T, heads, D]
        return PackedAttention.apply(*rows, context.blocks, scaling)[None], None

    AttentionInterface.register(ATTENTION, attention)
    model.set_attn_implementation(ATTENTION)


def _causal(size: int) -> Tensor:
    return torch.full((size, size), FORBIDDEN).triu(1)


def _softmax(scores: Tensor, bias: Tensor, scaling: float) -> Tensor:
    """Scores [.., rows, keys] plus a bias that repeats every bias.shape[3] rows, to probabilities."""
    by_position = scores.view(*bias.shape[:1], scores.shape[1], -1, *bias.shape[3:])
    return torch.softmax(torch.add(bias, by_position, alpha=scaling), -1).view(scores.shape)


def _softmax_backward(probs: Tensor, d_probs: Tensor, scaling: float) -> Tensor:
    d_scores = d_probs.mul_(probs)
    return d_scores.addcmul_(probs, d_scores.sum(-1, keepdim=True), value=-1).mul_(scaling)


def _to_blocks(x: Tensor, blocks: Blocks, num_kv: int, *, queries_only: bool = False) -> tuple[Tensor, Tensor]:
    """[T, heads, D] -> prompts [N, kv, R*P, D] and completions [N, kv, G, R*C, D]."""
    num_dims = x.shape[-1]
    prompt = x[blocks.prompt_NP].float()
    own = x[blocks.completion_NGC].float()
    if queries_only:
        prompt = prompt * blocks.is_query_NP[..., None, None]
        own = own * blocks.is_query_NGC[..., None, None]
    prompt = prompt.unflatten(-2, (num_kv, -1)).permute(0, 2, 3, 1, 4)
    own = own.unflatten(-2, (num_kv, -1)).permute(0, 3, 1, 4, 2, 5)
    return (
        prompt.reshape(prompt.shape[0], num_kv, -1, num_dims),
        own.reshape(own.shape[0], num_kv, own.shape[2], -1, num_dims),
    )


def _sum_root(d_prompt: Tensor, blocks: Blocks) -> Tensor:
    """The root's keys and values are read by every group: their gradients are summed where the first group has them."""
    root = slice(0, blocks.num_root)
    d_prompt[0, :, root] = d_prompt[:, :, root].sum(0)
    return d_prompt


def _from_blocks(prompt: Tensor, own: Tensor, blocks: Blocks, like: Tensor) -> Tensor:
    """The inverse of `_to_blocks`, in the shape and number format of `like`."""
    num_heads, num_dims = like.shape[1:]
    num_positions, longest = blocks.prompt_NP.shape[1], blocks.completion_NGC.shape[2]
    prompt = prompt.unflatten(2, (num_heads // prompt.shape[1], num_positions)).permute(0, 3, 1, 2, 4)
    own = own.unflatten(3, (num_heads // own.shape[1], longest)).permute(0, 2, 4, 1, 3, 5)
    rows = [block.to(like.dtype).reshape(-1, num_heads, num_dims) for block in (prompt, own)]
    return torch.cat(rows)[blocks.back_T]
