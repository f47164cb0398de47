"""Divide the tokens of a micro among ranks (Ulysses), for rollouts that are too long for one card.

    tokens of rank 0 | tokens of rank 1      embeddings, norms, linear layers, output layer: each rank its own tokens
        all heads    |     all heads
             \\          /                    attention: all tokens, each rank its own heads
        heads of rank 0, heads of rank 1
             /          \\
    tokens of rank 0 | tokens of rank 1

Logprobs of all tokens are gathered, so every rank of a context group computes the same loss. Its gradient flows back to
the rank's own tokens; FSDP adds up the gradients of all ranks. The number of tokens is padded to a multiple.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from treadle.errors import ConfigError
from treadle.train.ranks import Ranks

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # query [T, heads, D], key and value [T, kv heads, D]


@cache
def _new_group(rank: int, num_ranks: int, size: int) -> Any:
    """The group of this rank; all ranks create all groups, as torch requires."""
    groups = [dist.new_group(list(range(first, first + size))) for first in range(0, num_ranks, size)]
    return groups[rank // size]


@dataclass(frozen=True)
class ContextGroup:
    """Consecutive ranks that share each micro; `place`: of this rank among them."""

    group: Any
    size: int
    place: int

    @classmethod
    def of(cls, ranks: Ranks, size: int) -> ContextGroup | None:
        """None: every rank has all tokens of its micros."""
        if size == 1:
            return None
        return cls(_new_group(ranks.rank, ranks.size, size), size, ranks.rank % size)

    def part_size(self, num_tokens: int) -> int:
        """Tokens of each rank; the last ones are padding."""
        return -(-num_tokens // self.size)

    def take(self, values_T: Tensor) -> Tensor:
        """This rank's part of values for every token, padded with zeros."""
        part = self.part_size(len(values_T))
        return pad(values_T, (0, part * self.size - len(values_T)))[self.place * part : (self.place + 1) * part]

    def count_by_rank(self, tokens_D: Tensor, num_tokens: int) -> list[int]:
        """How many of these tokens, in ascending order, each rank has."""
        starts = torch.arange(self.size + 1, device=tokens_D.device) * self.part_size(num_tokens)
        ends: list[int] = torch.searchsorted(tokens_D, starts).diff().tolist()
        return ends

    def attend(self, query: Tensor, key: Tensor, value: Tensor, num_tokens: int, attend: Attend) -> Tensor:
        """`attend` for all tokens and this rank's heads; arguments and result are of this rank's tokens, all heads."""
        num_kv = key.shape[1]
        if num_kv < self.size:  # every rank needs one
            key, value = (x.repeat_interleave(self.size // num_kv, dim=1) for x in (key, value))
        rows = (_Exchange.apply(x, self, "to heads")[:num_tokens] for x in (query, key, value))
        attended = attend(*rows)
        padded = pad(attended, (0, 0, 0, 0, 0, -num_tokens % self.size))
        out: Tensor = _Exchange.apply(padded, self, "to tokens")
        return out

    def gather(self, own: Tensor, sizes: list[int]) -> Tensor:
        """The parts of all ranks in order; a gradient goes to the own part alone, because all ranks compute the same
        loss. `sizes`: rows of each rank."""
        out: Tensor = _Gather.apply(own, self, sizes)
        return out


def check_heads(model_config: Any, size: int) -> None:
    """Refuse a model whose attention heads cannot be divided among the ranks; `model_config`: of transformers."""
    num_heads = model_config.num_attention_heads
    num_kv = getattr(model_config, "num_key_value_heads", None) or num_heads
    if num_heads % size or (num_kv % size and size % num_kv):
        raise ConfigError(
            f"--context-parallel {size} divides attention heads, and the model has {num_heads}, with {num_kv} for keys "
            "and values",
            fix=f"choose a number that divides {num_heads} and {num_kv}",
        )


class _Exchange(torch.autograd.Function):
    """All heads of own tokens <-> own heads of all tokens; backward is the opposite exchange."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, context: ContextGroup, direction: str) -> Tensor:
        ctx.context, ctx.direction = context, direction
        return _to_heads(x, context) if direction == "to heads" else _to_tokens(x, context)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        back = _to_tokens if ctx.direction == "to heads" else _to_heads
        return back(grads[0], ctx.context), None, None


def _to_heads(x: Tensor, context: ContextGroup) -> Tensor:
    """[T / size, heads, D] -> [T, heads / size, D]"""
    by_rank = x.unflatten(1, (context.size, -1)).transpose(0, 1).contiguous()  # [size, T / size, heads / size, D]
    received = torch.empty_like(by_rank)
    dist.all_to_all_single(received, by_rank, group=context.group)
    return received.flatten(0, 1)


def _to_tokens(x: Tensor, context: ContextGroup) -> Tensor:
    """[T, heads / size, D] -> [T / size, heads, D]"""
    by_rank = x.unflatten(0, (context.size, -1)).contiguous()  # [size, T / size, heads / size, D]
    received = torch.empty_like(by_rank)
    dist.all_to_all_single(received, by_rank, group=context.group)
    return received.transpose(0, 1).flatten(1, 2)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, context: ContextGroup, sizes: list[int]) -> Tensor:
        first = sum(sizes[: context.place])
        ctx.own = slice(first, first + len(own))
        longest = max(sizes)
        rows = [own.new_empty(longest, *own.shape[1:]) for _ in sizes]
        missing = [0, 0] * (own.ndim - 1) + [0, longest - len(own)]
        dist.all_gather(rows, pad(own, missing).contiguous(), group=context.group)
        return torch.cat([row[:size] for row, size in zip(rows, sizes, strict=True)])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0][ctx.own], None, None
