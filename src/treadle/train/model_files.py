"""The files of a model or an adapter: weights, and everything needed to load them elsewhere."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from treadle.train.durable import write_tensors

MODEL_FILES = ("config.json", "generation_config.json")
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json", "tokenizer.model",
    "vocab.json", "merges.txt", "added_tokens.json",
)  # fmt: skip


@dataclass(frozen=True)
class Kind:
    """What full training and adapters call their files."""

    prefix: str
    final: str
    weights: str
    copied: tuple[str, ...]  # from the folder of the model that training began with


FULL = Kind("step_", "final_model", "model.safetensors", MODEL_FILES + TOKENIZER_FILES)
# PEFT finds the model by adapter_config.json; a config.json would make the folder look like a model of its own.
ADAPTER = Kind("adapter_step_", "final_adapter", "adapter_model.safetensors", TOKENIZER_FILES)


def write_model(folder: Path, weights: Mapping[str, Tensor], base: Path) -> None:
    """`base` is the folder of the model that training began with."""
    write_tensors(weights, folder / FULL.weights)
    _copy(FULL, base, folder)


def write_adapter(folder: Path, adapter: Any, live: Mapping[str, Tensor], base: Path | None = None) -> None:
    """`adapter` is PEFT's model, `live` its trained parameters by the names that PEFT saves. `base`: whose tokenizer
    goes with it; an engine that serves the model has that."""
    write_tensors(live, folder / ADAPTER.weights)
    config = copy.copy(adapter.active_peft_config)
    config.inference_mode = True  # whoever loads it is not training, unless they say so
    config.save_pretrained(folder)
    if base is not None:
        _copy(ADAPTER, base, folder)


def _copy(kind: Kind, base: Path, folder: Path) -> None:
    for name in kind.copied:
        if (base / name).is_file():
            shutil.copyfile(base / name, folder / name)
