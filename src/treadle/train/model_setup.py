"""Prepare a model for training: choose trainable layers, save memory and time, test that packing is correct.

The self-test compares packed rollouts with single ones before training. A model whose layers mix tokens outside of
attention (convolutions, recurrent states), or that changes its logits after the output layer, would silently be trained
on wrong numbers.
"""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.func import functional_call
from torch.nn.functional import silu
from transformers.modeling_layers import GradientCheckpointingLayer

from treadle.config import TrainConfig
from treadle.config.section import refuse_missing
from treadle.errors import ConfigError, MissingExtra, ModelError
from treadle.log import get_logger
from treadle.train.attention import OTHER_MODEL
from treadle.train.pack import Micro, pack
from treadle.wire.groups import IGNORED, ScoredGroup

log = get_logger("trainer")

# ---- trainable parameters

LAYER_LISTS = ("layers", "h", "blocks")  # names that models use for the list of their layers
# Non-greedy, so that the outermost list is found: experts or blocks inside of a layer are numbered too.
_LAYER = re.compile(rf"^(?:.*?\.)?(?:{'|'.join(LAYER_LISTS)})\.(\d+)(?:\.|$)")


def layer_number(name: str) -> int | None:
    """The layer of a parameter or module; None outside of the layers.

    >>> layer_number("model.layers.12.mlp.up_proj.weight"), layer_number("transformer.h.0"), layer_number("lm_head")
    (12, 0, None)
    """
    found = _LAYER.match(name)
    return int(found[1]) if found else None


def check_layers(model: nn.Module, layers: Collection[int], *, flag: str) -> None:
    """Refuse layer numbers that the model does not have; `flag` names their setting."""
    numbers = {number for name, _ in model.named_modules() if (number := layer_number(name)) is not None}
    if layers and not numbers:
        raise ModelError("this model has no numbered layers to choose from", fix=f"leave {flag} out")
    refuse_missing(layers, numbers, flag=flag)


def choose_trainable(model: nn.Module, layers: tuple[int, ...] | None) -> int:
    """Freeze every parameter outside of `layers` (None: freeze nothing); returns the number of trained weights.

    `choose_trainable(model, (0, 1))` trains two layers; embeddings, last norm and output layer are frozen.
    """
    check_layers(model, layers or (), flag="--train-layer-indices")
    num_trained = 0
    for name, parameter in model.named_parameters():  # a tied parameter appears once
        trained = layers is None or layer_number(name) in layers
        parameter.requires_grad_(trained)
        num_trained += parameter.numel() if trained else 0
    if num_trained == 0:
        raise ConfigError(
            "no parameter is left to train", fix="give --train-layer-indices at least one layer, or leave it out"
        )
    return num_trained


# ---- less memory: norms and gated MLPs for eager CPU execution. Forward they are bit-identical to the model's own
# modules; backward they recompute what is cheap instead of storing it. (On a GPU the compiler does the same.)


class RecomputingNorm(torch.autograd.Function):
    """weight * round(x / root mean square). Stores x and one number per row, no fp32 copy."""

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
    """silu(gate) * up. Stores its inputs and recomputes silu(gate)."""

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
    out: Tensor = RecomputingNorm.apply(hidden_states, module.weight, module.variance_epsilon)
    return out


def _mlp(module: Any, x: Tensor) -> Tensor:
    out: Tensor = module.down_proj(LeanGate.apply(module.gate_proj(x), module.up_proj(x)))
    return out


def use_recomputing_modules(model: nn.Module) -> None:
    """Replace the forward functions of RMS norms and of MLPs with a silu gate, in place. They are recognized by what
    they compute, whatever their class is called; norms and MLPs of other kinds are logged."""
    dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
    forms: dict[type, Callable[..., Tensor] | None] = {}
    for module in model.modules():
        kind = type(module)
        if kind not in forms:
            forms[kind] = _lean_form(module, dtype)
        if (form := forms[kind]) is not None:
            module.forward = MethodType(form, module)
    names = [kind.__name__ for kind, form in forms.items() if form is None and not kind.__module__.startswith("torch.")]
    stored = sorted(name for name in names if re.search("norm|mlp", name, re.IGNORECASE))
    if stored:
        log.info("not_recomputed", modules=", ".join(stored), note="their activations are stored, which takes memory")


@torch.no_grad()
def _lean_form(module: Any, dtype: torch.dtype) -> Callable[..., Tensor] | None:
    """The function that gives the same bits as the module's forward; None if there is none."""
    own = dict(module.named_parameters())
    if len(inspect.signature(module.forward).parameters) != 1:
        return None
    draw = torch.Generator().manual_seed(0)
    if own.keys() == {"weight"} and own["weight"].ndim == 1 and hasattr(module, "variance_epsilon"):
        device, size = own["weight"].device, len(own["weight"])
        x, weight = (torch.randn(shape, generator=draw).to(device, dtype) for shape in ((1, 3, size), (size,)))
        expected = functional_call(module, {"weight": weight}, (x,))
        return _norm if torch.equal(expected, RecomputingNorm.apply(x, weight, module.variance_epsilon)) else None
    if all(isinstance(getattr(module, name, None), nn.Linear) for name in ("gate_proj", "up_proj", "down_proj")):
        shapes = {name: parameter.shape for name, parameter in own.items() if parameter.is_floating_point()}
        weights = {name: torch.randn(shape, generator=draw).to(own[name]) for name, shape in shapes.items()}
        x = torch.randn(1, 3, module.gate_proj.in_features, generator=draw).to(module.gate_proj.weight.device, dtype)
        expected = functional_call(module, weights, (x,))
        lean = copy.copy(module)
        lean.forward = MethodType(_mlp, lean)
        return _mlp if torch.equal(expected, functional_call(lean, weights, (x,))) else None
    return None


# ---- checkpointing, compilation and fused kernels


def _inductor_options() -> dict[str, Any]:
    """Compile one code for all sizes. By default inductor decides by the number of tokens whether to fuse two
    reductions, and compiles the layers again for smaller micros, which took 10 s in the middle of a run."""
    from torch._inductor import config

    if hasattr(config.triton, "mix_order_reduction_non_strict_mode"):
        return {"triton.mix_order_reduction_non_strict_mode": True}
    return {"triton.mix_order_reduction": False} if hasattr(config.triton, "mix_order_reduction") else {}


def prepare_layers(model: Any, config: TrainConfig, *, can_compile: bool) -> None:
    """Enable checkpointing and compilation per layer: layers are alike, so the compiled code of one serves all."""
    layers: list[Any] = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if config.gradient_checkpointing:
        if not layers:
            raise ConfigError(
                "this model cannot compute its activations again", fix="leave --gradient-checkpointing out"
            )
        model.gradient_checkpointing_enable({"use_reentrant": False})
        for layer in layers:
            layer.training = True  # transformers checks this flag of the layer; its dropouts stay off
    if config.compile == "on" and not can_compile:
        raise ConfigError(
            "layers are compiled only with the GPU's variable-length attention, without liger's kernels and without "
            "context parallel",
            fix="--compile auto",
        )
    if config.compile != "off" and can_compile:
        is_sharded = isinstance(model, FSDPModule)
        for layer in layers:
            if is_sharded:  # forward is called with whole weights; the hooks that gather them stay eager
                layer.forward = torch.compile(layer.forward, dynamic=True, options=_inductor_options())
            else:
                layer.compile(dynamic=True, options=_inductor_options())


def use_fused_kernels(model: nn.Module, config: TrainConfig, device: torch.device) -> None:
    if config.fused_kernels == "none":
        return
    if device.type != "cuda":
        raise ConfigError("liger's kernels run on a GPU only", fix="leave --fused-kernels out")
    try:
        from liger_kernel.transformers import _apply_liger_kernel_to_instance
    except ImportError:
        raise MissingExtra("--fused-kernels liger needs liger-kernel", fix="pip install 'treadle[gpu]'") from None
    # Its fused loss is not used: logprobs come from the chunked output layer (logprobs.py).
    _apply_liger_kernel_to_instance(model, fused_linear_cross_entropy=False, cross_entropy=False)


# ---- self-test

NUM_PROMPT, NUM_COMPLETION = 12, (20, 28)  # tokens of the sample
# Rounding is measured: the same rollouts through two of the model's own attention implementations. Packed rows may
# differ by a few times as much, or by a tiny amount.
MAX_ROUNDINGS, TINY = 4.0, 1e-4
MIXING_MODULES = (nn.Conv1d, nn.RNNBase)


def sample_group(vocab_size: int, num_tokens: Sequence[int] = NUM_COMPLETION) -> ScoredGroup:
    """Rollouts of one prompt, of random tokens: packing errors show with any."""
    draw = torch.Generator().manual_seed(0)
    lengths = (NUM_PROMPT, *num_tokens)
    prompt, *completions = (torch.randint(vocab_size, (n,), generator=draw).tolist() for n in lengths)
    return ScoredGroup(
        tokens=[prompt + completion for completion in completions],
        masks=[[IGNORED] * NUM_PROMPT + completion for completion in completions],
        scores=[float(index) for index in range(len(completions))],
    )


@dataclass(frozen=True)
class UnpackedLogprobs:
    logprobs_L: Tensor  # of the sample, each rollout alone, by the model's own code
    rounding: float  # mean difference between two of its attention implementations


def score_unpacked(model: Any) -> UnpackedLogprobs:
    """Call before the model is modified."""
    own = model.config._attn_implementation
    model.set_attn_implementation("eager")
    eager_L = _plain_logprobs(model)
    model.set_attn_implementation(own)
    logprobs_L = _plain_logprobs(model)
    return UnpackedLogprobs(logprobs_L, float((logprobs_L - eager_L).abs().mean()))


@torch.no_grad()
def _plain_logprobs(model: Any) -> Tensor:
    device = next(model.parameters()).device
    logprobs = []
    for tokens in sample_group(model.config.get_text_config().vocab_size).tokens:
        ids = torch.tensor([tokens], device=device)
        table = torch.log_softmax(model(input_ids=ids, use_cache=False).logits[0].float(), -1)
        logprobs.append(table[NUM_PROMPT - 1 : -1].gather(1, ids[0, NUM_PROMPT:, None].to(table.device)).squeeze(1))
    return torch.cat(logprobs)


def packed_sample(model: Any) -> Micro:
    config = TrainConfig(share_prompts="on", micro_tokens=1000)
    (micro,) = pack([sample_group(model.config.get_text_config().vocab_size)], config).micros
    return micro


def check_packed(model: Any, packed_L: Tensor, expected: UnpackedLogprobs) -> None:
    mixing = next((name for name, module in model.named_modules() if isinstance(module, MIXING_MODULES)), None)
    kinds = getattr(model.config.get_text_config(), "layer_types", None) or ()
    mixing = mixing or next((kind for kind in kinds if not kind.endswith("attention") or "linear" in kind), None)
    if mixing is not None:
        raise ModelError(f"the model mixes neighbouring tokens outside of attention ({mixing})", fix=OTHER_MODEL)
    gap = float((packed_L - expected.logprobs_L).abs().mean())
    if not gap <= MAX_ROUNDINGS * expected.rounding + TINY:
        raise ModelError(
            f"packed rollouts and single ones differ by {gap:.3f} nats in the mean, where rounding explains "
            f"{expected.rounding:.4f}: the trainer would compute this model wrongly (it changes its logits after the "
            "output layer, or has layers that are no attention)",
            fix=OTHER_MODEL,
        )
