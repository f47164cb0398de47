"""Add low-rank adapters (LoRA) to a frozen model with PEFT, and merge or export them.

    y = W x + scale * B (A x)        W: the model's own weight, frozen      A, B: the adapter, fp32, trained

PEFT replaces each adapted linear layer by a module of its own, which contains the layer as `base_layer`. Engines and
checkpoints use the original names; the functions here translate.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from peft import LoraConfig, PeftModel, TaskType, get_peft_model
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from treadle.config.train import LoraOptions
from treadle.errors import ConfigError
from treadle.train.model_setup import LAYER_LISTS, check_layers, layer_number
from treadle.train.sharding import whole

AT_ONCE = 64  # matrices that are copied to fp32 at the same time
ADAPTER = "default"  # PEFT's name of the only adapter
LORA = ".lora_"  # in the names of adapters' parameters
WRAPPED = "base_model.model."  # PEFT's prefix for the wrapped model


def add_adapters(model: Any, options: LoraOptions) -> PeftModel:
    """Freeze `model` and add adapters to it, in place; they start as zero, so its outputs do not change.

    The model may still be called directly: `add_adapters(model, options); model.base_model(input_ids=...)` goes
    through the adapters. Wrong targets or layers are refused here, before PEFT would pass over them in silence.
    """
    _check_targets(model, options)
    layers = options.train_layer_indices
    alpha = options.lora_alpha
    config = LoraConfig(
        task_type=TaskType.CAUSAL_LM,
        r=options.lora_r,
        lora_alpha=int(alpha) if alpha.is_integer() else alpha,  # readers of adapter_config.json expect an integer
        lora_dropout=options.lora_dropout,
        target_modules=list(options.lora_target_modules),
        layers_to_transform=None if layers is None else list(layers),
        layers_pattern=None if layers is None else list(LAYER_LISTS),
        bias="none",
    )
    adapted = get_peft_model(model, config, adapter_name=ADAPTER, autocast_adapter_dtype=True)
    set_dropout(adapted, on=False)
    return adapted


def set_dropout(adapted: PeftModel, *, on: bool) -> None:
    """Switch the adapters' dropout on or off; all other dropout stays off, as in the rollout policy."""
    adapted.eval()
    for _, layer in _adapted_layers(adapted):
        layer.lora_dropout.train(on)


@contextmanager
def without_dropout(adapted: PeftModel) -> Iterator[None]:
    """Switch dropout off temporarily during training."""
    dropouts = [layer.lora_dropout for _, layer in _adapted_layers(adapted)]
    before = [dropout.training for dropout in dropouts]
    for dropout in dropouts:
        dropout.train(False)
    try:
        yield
    finally:
        for dropout, was_on in zip(dropouts, before, strict=True):
            dropout.train(was_on)


def adapter_parameters(adapted: PeftModel) -> dict[str, nn.Parameter]:
    """The trained parameters under the names that PEFT saves: `base_model.model...q_proj.lora_A.weight`."""
    return {
        name.replace(f".{ADAPTER}.", "."): parameter for name, parameter in adapted.named_parameters() if LORA in name
    }


def base_name(name: str) -> str:
    """The original name of a weight.

    >>> base_name("base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight")
    'model.layers.0.self_attn.q_proj.weight'
    """
    return name.removeprefix(WRAPPED).replace(".base_layer.", ".")


def original_weights(adapted: PeftModel) -> dict[str, nn.Parameter]:
    """The frozen weights of the model under their original names; a tied one appears once."""
    named = adapted.get_base_model().named_parameters()
    return {base_name(name): parameter for name, parameter in named if LORA not in name}


@torch.no_grad()
def merged_weights(adapted: PeftModel) -> Iterator[tuple[str, Tensor]]:
    """(original name, W + scale * B A) of each adapted weight, one at a time; summed in fp32, then rounded once."""
    for name, layer in _adapted_layers(adapted):
        weight: Tensor = layer.get_base_layer().weight
        yield f"{name}.weight", (weight.float() + layer.get_delta_weight(ADAPTER)).to(weight.dtype)


class ServedAdapter:
    """The adapters in the engine's number format, with B multiplied by the scale."""

    def __init__(self, adapted: PeftModel, dtype: torch.dtype, device: torch.device) -> None:
        self._sources: list[Tensor] = []
        self._scaled: list[Tensor] = []
        self._scales: list[float] = []
        self.named: dict[str, Tensor] = {}
        for name, layer in _adapted_layers(adapted):
            for part in ("lora_A", "lora_B"):
                weight: Tensor = getattr(layer, part)[ADAPTER].weight.detach()
                self._sources.append(weight)
                self.named[f"{name}.{part}"] = torch.empty(weight.shape, dtype=dtype, device=device)
            self._scaled.append(self.named[f"{name}.lora_B"])
            self._scales.append(float(layer.scaling[ADAPTER]))
        self._are_scales_exact = all(float(torch.tensor(scale, dtype=dtype)) == scale for scale in self._scales)

    @torch.no_grad()
    def refresh(self) -> None:
        """Round, scale in fp32 and round again, like a product of a tensor and a number. A single call for all matrices
        also rounds the scale, so scales that are not exact in this format are multiplied in fp32."""
        torch._foreach_copy_(list(self.named.values()), [whole(source) for source in self._sources])
        if self._are_scales_exact:
            torch._foreach_mul_(self._scaled, self._scales)
            return
        for start in range(0, len(self._scaled), AT_ONCE):
            some = self._scaled[start : start + AT_ONCE]
            wide = [matrix.float() for matrix in some]
            torch._foreach_mul_(wide, self._scales[start : start + AT_ONCE])
            torch._foreach_copy_(some, wide)


def _adapted_layers(adapted: PeftModel) -> Iterator[tuple[str, Any]]:
    """Layers with an adapter, by their original names."""
    for name, module in adapted.get_base_model().named_modules():
        if isinstance(module, LoraLayer):
            yield name, module


def _check_targets(model: Any, options: LoraOptions) -> None:
    """Each target must match a linear layer, in at least one of the chosen layers."""
    layers = options.train_layer_indices
    if not options.lora_target_modules or layers == ():
        raise ConfigError(
            "no layer would get an adapter, so there is nothing to train",
            fix="name at least one layer with --lora-target-modules, and leave --train-layer-indices out for all",
        )
    check_layers(model, layers or (), flag="--train-layer-indices")
    outer = (model.get_output_embeddings(), model.get_input_embeddings())
    linear = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and module is not outer[0]
    ]
    for target in options.lora_target_modules:
        if any(_names(target, name) for name, module in model.named_modules() if module in outer):
            raise ConfigError(
                f"'{target}' cannot have an adapter: the trainer applies the output layer in chunks, straight from its "
                "weight, and the embeddings are often the same weight",
                fix="name layers inside of the model with --lora-target-modules, for example q_proj v_proj",
            )
        places = [name for name in linear if _names(target, name)]
        if not places:
            known = ", ".join(sorted({name.rpartition(".")[2] for name in linear}))
            raise ConfigError(
                f"the model has no linear layer '{target}'; it has {known}", fix="correct --lora-target-modules"
            )
        if layers is not None and not any(layer_number(name) in layers for name in places):
            others = f" and {len(places) - 3} more" if len(places) > 3 else ""
            raise ConfigError(
                f"none of the chosen layers has a '{target}'; it is in {', '.join(places[:3])}{others}",
                fix="correct --train-layer-indices or --lora-target-modules",
            )


def _names(target: str, name: str) -> bool:
    """Whether a target matches a module: its whole name, or the end of it."""
    return name == target or name.endswith(f".{target}")
