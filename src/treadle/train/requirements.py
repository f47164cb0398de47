"""Check what a trainer needs, before it loads torch or waits for a hub. Does not import torch."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path

from treadle.config.section import num_layers_in, refuse_missing
from treadle.config.train import TrainConfig
from treadle.errors import MissingExtra, Problems, require
from treadle.track.trackers import check_sinks


def check_trainer(config: TrainConfig, env: Mapping[str, str], model_folder: Path | None = None) -> None:
    """Raise all problems of these settings; `model_folder`: the model, if it is on this machine."""
    problems = Problems()
    with problems.collected():
        require("train", "torch", "transformers")
    with problems.collected():
        if config.quantization != "none":
            require("quantization", "bitsandbytes")
    with problems.collected():
        check_sinks(config, env)
    with problems.collected():
        if config.attention == "flash4" and not has_flash4():
            raise MissingExtra("--attention flash4 needs flash-attn-4", fix="pip install 'treadle[gpu]'")
    with problems.collected():
        if config.fused_kernels == "liger" and importlib.util.find_spec("liger_kernel") is None:
            raise MissingExtra("--fused-kernels liger needs liger-kernel", fix="pip install 'treadle[gpu]'")
    if model_folder is not None:
        with problems.collected():
            check_layers(config, model_folder)
    problems.raise_all()


def check_layers(config: TrainConfig, model_folder: Path) -> None:
    """Refuse layers that the model does not have, if its config.json says how many there are."""
    number = num_layers_in(model_folder)
    if number:
        refuse_missing(config.train_layer_indices or (), range(number), flag="--train-layer-indices")


def has_flash4() -> bool:
    """Whether FlashAttention 4 is installed: version 2 has the same package name, 4 is a subfolder of it."""
    package = importlib.util.find_spec("flash_attn")
    folders = [] if package is None else package.submodule_search_locations or []
    return any((Path(folder) / "cute").is_dir() for folder in folders) and bool(importlib.util.find_spec("cutlass"))
