"""FlashAttention 4's kernels on Hopper and Blackwell cards: the work of torch's variable-length kernel in less time.

torch has a switch to use them itself, which fits one version of them only; as operators of our own they are the same
for every torch, and torch.compile goes on around them. The backward function has an underscore, and is the one that
torch's switch calls too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from treadle.errors import ConfigError, MissingExtra
from treadle.train.requirements import has_flash4

HEAD_SIZES = (64, 128)  # the ones that tests compare with torch's kernel
FIRST_CARD = (9, 0)  # compute capability: Hopper


def is_usable(device: torch.device, head_size: int) -> bool:
    return has_card(device) and head_size in HEAD_SIZES and has_flash4()


def has_card(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= FIRST_CARD


def require(device: torch.device, head_size: int) -> None:
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
    """(attended [T, heads, D], log of the sums of exponentials [heads, T]). `window` -1: no limit to the past."""
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
