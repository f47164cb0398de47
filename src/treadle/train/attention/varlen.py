"""Attention by a variable-length kernel, on CUDA: the packed row as it is, nothing padded.

Queries are the packed row. Keys and values are too, unless prompts are shared: then each piece's keys are gathered
behind one another (root, prompt, own), and the kernel's causal mask, aligned at the end, is just the right one.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from treadle.train.attention.flash4 import attend_flash4
from treadle.train.attention.sdpa import pieces_of
from treadle.train.pack import Segment

# torch 2.11 takes fewer key and value heads without being told; later ones want to be told.
_GROUPED: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


GATHERING = ("token_K", "place_T", "shared_S", "place_D", "slot_D")


@dataclass(frozen=True)
class Gathering:
    """Which packed token each gathered key is, and back: where a token's keys went.

    `_K` runs over gathered keys, `_S` over the tokens that were gathered more than once (roots and prompts), `_D` over
    their further copies.
    """

    token_K: Tensor
    place_T: Tensor  # the first place of each token among the gathered keys
    shared_S: Tensor
    place_D: Tensor  # where the further copies are
    slot_D: Tensor  # which of the shared tokens each is a copy of

    @classmethod
    def of(cls, token_K: np.ndarray, num_tokens: int, device: torch.device) -> Gathering:
        order_K = np.argsort(token_K, kind="stable")
        counts_T = np.bincount(token_K, minlength=num_tokens)
        first_T = np.concatenate([[0], counts_T.cumsum()[:-1]])
        shared_S = np.flatnonzero(counts_T > 1)
        is_further_K = np.ones(len(token_K), dtype=bool)
        is_further_K[first_T] = False
        slot_D = np.repeat(np.arange(len(shared_S)), counts_T[shared_S] - 1)
        arrays = (token_K, order_K[first_T], shared_S, order_K[is_further_K], slot_D)
        return cls(*(torch.from_numpy(array).to(device, non_blocking=True) for array in arrays))

    def arguments(self) -> dict[str, Tensor]:
        return {name: getattr(self, name) for name in GATHERING}


class GatherKeys(torch.autograd.Function):
    """x[token_K]. The gradient of a shared token is the sum over its copies, in fp32: bf16 sums are slow and coarse."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, token_K: Tensor, place_T: Tensor, shared_S: Tensor, place_D: Tensor, slot_D: Tensor
    ) -> Tensor:
        ctx.save_for_backward(place_T, shared_S, place_D, slot_D)
        return x.index_select(0, token_K)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        place_T, shared_S, place_D, slot_D = ctx.saved_tensors
        d_x = grads[0].index_select(0, place_T)
        d_shared = d_x.index_select(0, shared_S).float()
        d_shared = d_shared.index_add(0, slot_D, grads[0].index_select(0, place_D).float())
        return d_x.index_copy(0, shared_S, d_shared.to(d_x.dtype)), None, None, None, None, None


@dataclass(frozen=True)
class VarlenPlan:
    starts_q: Tensor  # int32, where each piece begins in the packed row, and its end
    starts_k: Tensor
    longest_q: int
    longest_k: int
    gathering: Gathering | None  # None: the keys are the packed row itself

    @classmethod
    def of(cls, segments: Sequence[Segment], device: torch.device) -> VarlenPlan:
        pieces = pieces_of(segments)
        starts_q = _starts([piece.num_queries for piece in pieces], device)
        if not any(piece.before for piece in pieces):
            longest = max(piece.num_queries for piece in pieces)
            return cls(starts_q, starts_q, longest, longest, None)
        tokens = np.concatenate([np.arange(*span) for piece in pieces for span in (*piece.before, piece.own)])
        return cls(
            starts_q,
            _starts([piece.num_keys for piece in pieces], device),
            max(piece.num_queries for piece in pieces),
            max(piece.num_keys for piece in pieces),
            Gathering.of(tokens, pieces[-1].own[1], device),
        )

    def arguments(self) -> dict[str, Any]:
        """What the attention of every layer gets, as plain tensors and numbers: torch.compile sees no object, and no
        tuple that is sometimes there, on which its guards fail (torch 2.11)."""
        return {
            "starts_q": self.starts_q,
            "starts_k": self.starts_k,
            "longest_q": self.longest_q,
            "longest_k": self.longest_k,
            **(dict.fromkeys(GATHERING) if self.gathering is None else self.gathering.arguments()),
        }


def attend_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float,
    window: int,
    *,
    starts_q: Tensor,
    starts_k: Tensor,
    longest_q: int,
    longest_k: int,
    use_flash4: bool,
    token_K: Tensor | None,
    **gathering: Tensor | None,
) -> Tensor:
    """query [T, heads, D], key and value [T, kv heads, D] -> [T, heads, D]. `window` -1: no limit to the past."""
    if token_K is not None:
        gathered = (token_K, *(gathering[name] for name in GATHERING[1:]))
        key, value = GatherKeys.apply(key, *gathered), GatherKeys.apply(value, *gathered)
    if use_flash4:
        return attend_flash4(query, key, value, starts_q, starts_k, longest_q, longest_k, scaling, window)[0]
    out = varlen_attn(
        query, key, value, starts_q, starts_k, longest_q, longest_k,
        scale=scaling, window_size=(window, 0), **_GROUPED,
    )  # fmt: skip
    assert isinstance(out, Tensor)  # noqa: S101  # a pair only when the sums of exponentials are asked for too
    return out


def _starts(lengths: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32).to(device, non_blocking=True)
