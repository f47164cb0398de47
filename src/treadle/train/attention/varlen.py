"""Compute attention by variable-length kernels on CUDA, without padding: torch's, or those of FlashAttention 4.

Queries are the packed row. Keys and values are too, unless prompts are shared: then each piece's keys are gathered
(root, prompt, own), and the kernel's causal mask, aligned at the end, is correct.

FlashAttention 4 is faster on Hopper and Blackwell. torch can switch to it, but only for one version of it; as custom
operators it works with every torch and with torch.compile. Its private backward function is the one that torch calls.
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

from treadle.errors import ConfigError, MissingExtra
from treadle.train.attention.cpu import pieces_of
from treadle.train.pack import Segment
from treadle.train.requirements import has_flash4

HEAD_SIZES = (64, 128)  # of FlashAttention 4: those that tests compare with torch's kernel
FIRST_CARD = (9, 0)  # compute capability: Hopper
# torch 2.11 detects fewer key and value heads; later versions need a flag.
_GROUPED: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
GATHERING = ("token_K", "place_T", "shared_S", "place_D", "slot_D")

# ---- FlashAttention 4


def can_use_flash4(device: torch.device, head_size: int) -> bool:
    return has_card(device) and head_size in HEAD_SIZES and has_flash4()


def has_card(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= FIRST_CARD


def require_flash4(device: torch.device, head_size: int) -> None:
    """Refuse --attention flash4 where it cannot work."""
    if not has_card(device) or head_size not in HEAD_SIZES:
        raise ConfigError(
            f"FlashAttention 4 is for Hopper and Blackwell cards and heads of {HEAD_SIZES}, not {head_size} here",
            fix="--attention auto",
        )
    if not has_flash4():
        raise MissingExtra("--attention flash4 needs flash-attn-4", fix="pip install 'treadle[gpu]'")


@torch.library.custom_op("treadle::flash4", mutates_args=())
def attend_flash4(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts_q: Tensor,
    starts_k: Tensor,
    longest_q: int,
    longest_k: int,
    scaling: float,
    window: int,
) -> tuple[Tensor, Tensor]:
    """(attended [T, heads, D], log-sum-exp [heads, T]). `window` -1: unlimited."""
    from flash_attn.cute import flash_attn_varlen_func

    attended, sums = flash_attn_varlen_func(
        query, key, value, cu_seqlens_q=starts_q, cu_seqlens_k=starts_k, max_seqlen_q=longest_q,
        max_seqlen_k=longest_k, softmax_scale=scaling, return_lse=True, **_mask(window),
    )  # fmt: skip
    return attended, sums


@attend_flash4.register_fake
def _shapes(query: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(query), query.new_empty((query.shape[1], query.shape[0]), dtype=torch.float32)


@torch.library.custom_op("treadle::flash4_backward", mutates_args=())
def _backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attended: Tensor,
    sums: Tensor,
    starts_q: Tensor,
    starts_k: Tensor,
    longest_q: int,
    longest_k: int,
    scaling: float,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    from flash_attn.cute.interface import _flash_attn_bwd

    mask = _mask(window)
    left, right = mask.get("window_size", (None, None))
    d_query, d_key, d_value = _flash_attn_bwd(
        query, key, value, attended, gradient, sums, scaling, mask["causal"], window_size_left=left,
        window_size_right=right, cu_seqlens_q=starts_q, cu_seqlens_k=starts_k, max_seqlen_q=longest_q,
        max_seqlen_k=longest_k,
    )  # fmt: skip
    return d_query, d_key, d_value


@_backward.register_fake
def _gradient_shapes(gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, starts_q, starts_k, *ctx.numbers = inputs
    ctx.save_for_backward(query, key, value, *output, starts_q, starts_k)


def _gradients(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    return *_backward(gradient.contiguous(), *ctx.saved_tensors, *ctx.numbers), *[None] * 6


attend_flash4.register_autograd(_gradients, setup_context=_keep)


def _mask(window: int) -> dict[str, Any]:
    return {"causal": True} if window == -1 else {"causal": False, "window_size": (window, 0)}


# ---- plans


@dataclass(frozen=True)
class Gathering:
    """Which packed token each gathered key is, and where each token's keys are.

    `_K` runs over gathered keys, `_S` over tokens that were gathered more than once (roots and prompts), `_D` over
    their additional copies.
    """

    token_K: Tensor
    place_T: Tensor  # index of the first copy of each token among the gathered keys
    shared_S: Tensor
    place_D: Tensor  # indices of the additional copies
    slot_D: Tensor  # index into S of the token that each is a copy of

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
    """x[token_K]. The gradient of a shared token is summed over its copies in fp32: bf16 sums are slow and
    imprecise."""

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
    starts_q: Tensor  # int32: start of each piece in the packed row, and the end of the last
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
        """Arguments for the attention of every layer, as plain tensors and numbers: torch.compile's guards fail on
        objects and on optional tuples (torch 2.11)."""
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
    """query [T, heads, D], key and value [T, kv heads, D] -> [T, heads, D]. `window` -1: unlimited."""
    if token_K is not None:
        gathered = (token_K, *(gathering[name] for name in GATHERING[1:]))
        key, value = GatherKeys.apply(key, *gathered), GatherKeys.apply(value, *gathered)
    if use_flash4:
        return attend_flash4(query, key, value, starts_q, starts_k, longest_q, longest_k, scaling, window)[0]
    out = varlen_attn(
        query, key, value, starts_q, starts_k, longest_q, longest_k,
        scale=scaling, window_size=(window, 0), **_GROUPED,
    )  # fmt: skip
    assert isinstance(out, Tensor)  # noqa: S101  # a pair only if log-sum-exp is requested
    return out


def _starts(lengths: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32).to(device, non_blocking=True)
