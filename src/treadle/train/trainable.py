"""Which parameters are trained: all of them, or those of some layers."""

from __future__ import annotations

import re
from collections.abc import Collection

from torch import nn

from treadle.config.layers import refuse_missing
from treadle.errors import ConfigError, ModelError

LAYER_LISTS = ("layers", "h", "blocks")  # what models call the list of their layers
# Lazy, so that the first list counts: experts or blocks inside a layer are numbered too.
_LAYER = re.compile(rf"^(?:.*?\.)?(?:{'|'.join(LAYER_LISTS)})\.(\d+)(?:\.|$)")


def layer_number(name: str) -> int | None:
    """The layer a parameter or module belongs to; None for what stands outside of the layers.

    >>> layer_number("model.layers.12.mlp.up_proj.weight"), layer_number("transformer.h.0"), layer_number("lm_head")
    (12, 0, None)
    """
    found = _LAYER.match(name)
    return int(found[1]) if found else None


def check_layers(model: nn.Module, layers: Collection[int], *, flag: str) -> None:
    """Refuse layer numbers that the model does not have; `flag` is where they came from."""
    numbers = {number for name, _ in model.named_modules() if (number := layer_number(name)) is not None}
    if layers and not numbers:
        raise ModelError("this model has no numbered layers to choose from", fix=f"leave {flag} out")
    refuse_missing(layers, numbers, flag=flag)


def choose_trainable(model: nn.Module, layers: tuple[int, ...] | None) -> int:
    """Freeze every parameter outside of `layers` (None: freeze nothing); returns how many numbers are trained.

    `choose_trainable(model, (0, 1))` trains two layers; embeddings, last norm and output layer stay as they are.
    """
    check_layers(model, layers or (), flag="--train-layer-indices")
    num_trained = 0
    for name, parameter in model.named_parameters():  # a tied parameter comes once
        trained = layers is None or layer_number(name) in layers
        parameter.requires_grad_(trained)
        num_trained += parameter.numel() if trained else 0
    if num_trained == 0:
        raise ConfigError(
            "no parameter is left to train", fix="give --train-layer-indices at least one layer, or leave it out"
        )
    return num_trained
