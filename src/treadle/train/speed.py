"""What makes a model faster or smaller in memory without changing what it computes, beyond rounding."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from treadle.config import TrainConfig
from treadle.errors import ConfigError, MissingExtra

# bf16 matrix products per second that a card's data sheet promises, dense, in 1e12.
PEAK_TFLOPS = {
    "H200": 989, "H100 PCIe": 756, "H100": 989, "GH200": 989, "B200": 2250, "B300": 2250, "A100": 312, "L40S": 362,
    "L40": 181, "L4": 121, "A10G": 70, "A40": 150, "RTX 5090": 210, "RTX 4090": 165, "RTX 3090": 71, "RTX A6000": 155,
}  # fmt: skip


def prepare_layers(model: Any, config: TrainConfig, *, can_compile: bool) -> None:
    """Checkpointing and compilation, layer by layer: layers are alike, so one is compiled and all run it."""
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if config.gradient_checkpointing:
        if not layers:
            raise ConfigError(
                "this model cannot compute its activations again", fix="leave --gradient-checkpointing out"
            )
        model.gradient_checkpointing_enable({"use_reentrant": False})
        for layer in layers:
            layer.training = True  # transformers asks the layer itself; its dropouts stay off
    if config.compile == "on" and not can_compile:
        raise ConfigError(
            "layers are compiled only with the GPU's variable-length attention, and without liger's kernels",
            fix="--compile auto",
        )
    if config.compile != "off" and can_compile:
        for layer in layers:
            layer.compile(dynamic=True)


def use_fused_kernels(model: nn.Module, config: TrainConfig) -> None:
    if config.fused_kernels == "none":
        return
    if not next(model.parameters()).is_cuda:
        raise ConfigError("liger's kernels run on a GPU only", fix="leave --fused-kernels out")
    try:
        from liger_kernel.transformers import _apply_liger_kernel_to_instance
    except ImportError:
        raise MissingExtra("--fused-kernels liger needs liger-kernel", fix="pip install 'treadle[gpu]'") from None
    # Its fused loss is left alone: logprobs come from our own chunked output layer.
    _apply_liger_kernel_to_instance(model, fused_linear_cross_entropy=False, cross_entropy=False)


def peak_flops(device: torch.device) -> float | None:
    """bf16 operations per second of this card; None where the data sheet is not known, and on a CPU."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((tflops * 1e12 for card, tflops in PEAK_TFLOPS.items() if card in name), None)
