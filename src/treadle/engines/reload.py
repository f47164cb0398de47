"""Weights from files into a model that serves: all of them, or only those that changed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from treadle.errors import RequestError


def read_weights(folder: Path, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors in `folder`, each of which has its place in `weights`; any that has none is refused by name."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise RequestError(f"{folder} holds no *.safetensors", fix="save the weights there first")
    found: dict[str, Tensor] = {}
    for file in files:
        try:
            found |= load_file(file)
        except (OSError, SafetensorError) as error:
            raise RequestError(f"{file} cannot be read: {error}", fix="save it again") from None
    for name, tensor in found.items():
        known = weights.get(name)
        if known is None:
            raise RequestError(f"{folder} holds {name}, which this model does not have", fix="use the engine's model")
        if known.shape != tensor.shape or not tensor.is_floating_point():
            raise RequestError(
                f"{name} in {folder} is {list(tensor.shape)} {tensor.dtype}, the engine's is {list(known.shape)}",
                fix="use the engine's model",
            )
    if not found:
        raise RequestError(f"the files in {folder} hold no weights", fix="save the weights there first")
    return found


@torch.no_grad()
def write_weights(found: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> None:
    for name, tensor in found.items():
        weights[name].copy_(tensor)
