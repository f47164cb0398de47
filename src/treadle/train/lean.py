"""Norms and gated MLPs that keep less for the backward pass, for models that run operation by operation on a CPU.

They compute what transformers' modules compute, bit for bit forward; backward they compute again what is cheap instead
of keeping it. (On a GPU the compiler does the same.)
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

NORMS = ("LlamaRMSNorm", "MistralRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm")
SILUS = ("SiLU", "SiLUActivation")
MLPS = ("LlamaMLP", "MistralMLP", "Qwen2MLP", "Qwen3MLP")


class LeanNorm(torch.autograd.Function):
    """weight * round(x / root mean square). Keeps x as it is and one number per row, no fp32 copy."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        wide = x.to(torch.float32, copy=True)
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
        ctx.save_for_backward(x, weight, scale)
        return weight * wide.mul_(scale).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weight, scale = ctx.saved_tensors
        normed = x.to(torch.float32, copy=True).mul_(scale)
        d_weight = None
        if ctx.needs_input_grad[1]:
            d_weight = (grads[0] * normed.to(x.dtype)).flatten(0, -2).sum(0)
        d_normed = (grads[0] * weight).float()
        share = (d_normed * normed).mean(-1, keepdim=True)
        return d_normed.sub_(normed.mul_(share)).mul_(scale).to(x.dtype), d_weight, None


class LeanGate(torch.autograd.Function):
    """silu(gate) * up. Keeps its inputs; silu(gate) is computed again."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return silu(gate) * up

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        d_gate: Tensor = torch.ops.aten.silu_backward(grads[0] * up, gate)
        return d_gate, silu(gate).mul_(grads[0])


def _norm(module: Any, hidden_states: Tensor) -> Tensor:
    out: Tensor = LeanNorm.apply(hidden_states, module.weight, module.variance_epsilon)
    return out


def _mlp(module: Any, x: Tensor) -> Tensor:
    out: Tensor = module.down_proj(LeanGate.apply(module.gate_proj(x), module.up_proj(x)))
    return out


def make_lean(model: nn.Module) -> None:
    """Change the modules that are known, in place; all others stay as they are."""
    forms: dict[str, Callable[..., Tensor]] = {**dict.fromkeys(NORMS, _norm), **dict.fromkeys(MLPS, _mlp)}
    for module in model.modules():
        form = forms.get(type(module).__name__)
        if form is _mlp and type(getattr(module, "act_fn", None)).__name__ not in SILUS:
            continue
        if form is not None:
            module.forward = MethodType(form, module)
