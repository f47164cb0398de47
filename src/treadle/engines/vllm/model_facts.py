"""What a model's folder says about it, read without loading it."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from treadle.engines.model_folder import REFETCH_FIX, read_header, read_settings
from treadle.errors import ModelError, RequestError
from treadle.sync.layout import BYTES_PER_ELEMENT


@dataclass(frozen=True)
class ModelFacts:
    folder: Path
    dtype: str  # the checkpoint's own
    vocab_size: int
    max_positions: int | None
    eos_ids: frozenset[int]
    linear_modules: tuple[str, ...]  # the last names of the matrices in its layers: q_proj, down_proj, ...


def read_model_facts(folder: Path) -> ModelFacts:
    config = read_settings(folder / "config.json")
    generation_file = folder / "generation_config.json"
    generation = read_settings(generation_file) if generation_file.is_file() else {}
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
    if dtype not in BYTES_PER_ELEMENT:
        raise ModelError(f"{folder}'s weights are {dtype}", fix=f"name a number format: {sorted(BYTES_PER_ELEMENT)}")
    vocab_size = config.get("vocab_size")
    if not isinstance(vocab_size, int):
        raise ModelError(f"{folder}/config.json names no vocab_size", fix="only models of text alone are served")
    eos = generation.get("eos_token_id", config.get("eos_token_id"))
    eos_ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
    if not all(type(token) is int for token in eos_ids):
        raise ModelError(f"{folder} has {eos!r} for eos_token_id", fix=REFETCH_FIX)
    return ModelFacts(
        folder=folder,
        dtype=dtype,
        vocab_size=vocab_size,
        max_positions=None if _has_rope_scaling(config) else config.get("max_position_embeddings"),
        eos_ids=frozenset(eos_ids),
        linear_modules=_linear_modules(folder),
    )


def absolute(path: Path) -> Path:
    """vLLM has another working folder, perhaps."""
    return path.expanduser().resolve()


def folder_of_weights(folder: Path) -> Path:
    folder = absolute(folder)
    if not any(folder.glob("*.safetensors")):
        raise RequestError(f"{folder} holds no *.safetensors weights", fix="give the folder of a saved model")
    return folder


@functools.cache
def empty_model(folder: Path) -> Any:
    """The model as transformers builds it, its names and shapes without weights."""
    import torch  # slow to load; asked for by few
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))


def _linear_modules(folder: Path) -> tuple[str, ...]:
    """By the headers of its weights; a layer has a number in its name, an embedding or an output has none."""
    found = set()
    for file in sorted(folder.glob("*.safetensors")):
        for name, tensor in read_header(file).items():
            *path, module, leaf = name.split(".")
            if leaf == "weight" and len(tensor["shape"]) == 2 and any(part.isdigit() for part in path):
                found.add(module)
    return tuple(sorted(found))


def _has_rope_scaling(config: dict[str, Any]) -> bool:
    """Then the longest text is more than max_position_embeddings says, and only the model's own code knows how much."""
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(rope, dict):
        raise ModelError(f"config.json has {rope!r} for scaled positions", fix=REFETCH_FIX)
    return rope.get("rope_type", rope.get("type", "default")) != "default"
