"""Choose and apply attention for packed rows: each completion sees the root, its group's prompt and itself.

    on a CPU    short completions: dense blocks; long ones: piece by piece (cpu.py)
    on CUDA     variable-length kernels (varlen.py): FlashAttention 4 if it is installed and supports the card, else
                torch's; fp32, which has no such kernel, piece by piece

The plan of a micro is made once and passed to every layer through arguments of the model's forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from treadle.errors import ConfigError, ModelError
from treadle.train.attention.cpu import SdpaPlan, num_pairs, plan_blocks
from treadle.train.attention.varlen import GATHERING, VarlenPlan, attend_varlen, can_use_flash4, require_flash4
from treadle.train.pack import Segment

ATTENTION = "treadle_packed"
MAX_BLOCK_PAIRS = 1_000_000  # probabilities that dense blocks store, per head and layer
# Features that change the scores: such a model would be trained on other numbers than it is served with.
_UNSUPPORTED = {"softcap": "soft-capped scores", "s_aux": "attention sinks", "position_bias": "position biases"}

OTHER_MODEL = "use a model of another family (Llama, Qwen, Mistral, SmolLM)"

AttentionKind = Literal["auto", "blocks", "sdpa", "varlen", "flash4"]
VARIABLE_LENGTH = ("varlen", "flash4")  # kernels that support compiled layers


def plan_attention(segments: Sequence[Segment], device: torch.device, kind: AttentionKind) -> dict[str, Any]:
    """Arguments of the model's forward for the attention of one micro."""
    if kind in VARIABLE_LENGTH:
        return {**VarlenPlan.of(segments, device).arguments(), "use_flash4": kind == "flash4"}
    few_pairs = num_pairs(segments) <= MAX_BLOCK_PAIRS
    if kind == "blocks" or (kind == "auto" and device.type == "cpu" and few_pairs):
        return {"plan": plan_blocks(segments)}
    return {"plan": SdpaPlan.of(segments, device)}


def choose_kind(requested: AttentionKind, device: torch.device, dtype: torch.dtype, head_size: int) -> AttentionKind:
    """Variable-length attention if there is a kernel; else "auto", which is decided by the size of each micro."""
    has_kernel = device.type == "cuda" and dtype in (torch.bfloat16, torch.float16)
    if requested in VARIABLE_LENGTH and not has_kernel:
        raise ConfigError(f"there is no variable-length attention for {dtype} on {device.type}", fix="--attention auto")
    if requested == "flash4":
        require_flash4(device, head_size)
    if requested == "blocks" and device.type != "cpu":
        raise ConfigError("attention in blocks is for CPUs", fix="--attention auto")
    if requested == "auto" and has_kernel:
        return "flash4" if can_use_flash4(device, head_size) else "varlen"
    return requested


def head_size(config: Any) -> int:
    """Size of an attention head, given or implied by a model's configuration."""
    size = getattr(config, "head_dim", None)
    return int(size or config.hidden_size // config.num_attention_heads)


def install_attention(model: Any) -> None:
    """Make `model` use packed attention, through transformers' attention interface."""
    AttentionInterface.register(ATTENTION, attend)
    model.set_attn_implementation(ATTENTION)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    *,
    scaling: float,
    plan: Any = None,
    sliding_window: int | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """Called by transformers in every layer: [1, heads, T, D] in, [1, T, heads, D] out."""
    for name, meaning in _UNSUPPORTED.items():
        if more.get(name) is not None:
            raise ModelError(f"the model's attention has {meaning}, which the trainer does not do", fix=OTHER_MODEL)
    rows = (query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1))
    if plan is not None:
        if sliding_window is not None and rows[0].shape[0] > sliding_window:
            raise ModelError(
                f"the model sees only the last {sliding_window} tokens, which the CPU's attention does not do",
                fix="train on a GPU, or lower --train.micro-tokens to the window",
            )
        return plan.attend(*rows, scaling)[None], None
    if "starts_q" not in more:
        raise ModelError("the model does not hand the packing to its attention", fix=OTHER_MODEL)
    names = ("starts_q", "starts_k", "longest_q", "longest_k", "use_flash4", *GATHERING)
    arguments = {name: more[name] for name in names}
    window = -1 if sliding_window is None else sliding_window - 1
    return attend_varlen(*rows, scaling, window, **arguments)[None], None
