"""Check model and adapter folders before a library opens them, and read what serving needs without loading them.

Damage is reported with its fix, and file types that could run code are refused. vLLM's processes and the launcher
import this module too, so it must stay free of torch.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from reprlib import repr as brief
from typing import Annotated, Any, Literal

import msgspec

from treadle.errors import ModelError, RequestError
from treadle.sync.layout import BYTES_PER_ELEMENT

# File types that a model folder and its subfolders may contain: weights, settings, text, images. An allow list, because
# a list of dangerous types (.py, .bin, .pt, .ckpt, .pickle, .so, ...) would never be complete.
HARMLESS_SUFFIXES = frozenset({
    "", ".safetensors", ".tensors", ".gguf", ".json", ".jsonl", ".jinja", ".model", ".tiktoken", ".txt", ".md", ".rst",
    ".yaml", ".yml", ".toml", ".csv", ".tsv", ".log", ".lock", ".metadata", ".png", ".jpg", ".jpeg", ".gif", ".svg",
    ".webp", ".pdf",
})  # fmt: skip
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_FILES = (ADAPTER_CONFIG, "adapter_model.safetensors")  # as PEFT saves an adapter
MAX_CONFIG_BYTES = 1 << 20  # of ADAPTER_CONFIG
UNREAD_FOLDERS = (".git", ".cache")  # of git and huggingface_hub; no library loads anything from them
INDEX = "model.safetensors.index.json"
SETTINGS = ("tokenizer.json", "special_tokens_map.json", "added_tokens.json", "chat_template.json", "vocab.json", INDEX)
REFETCH_FIX = "fetch or save the model again"
MAX_HEADER_BYTES = 100 << 20  # safetensors' own limit


def is_adapter(folder: Path) -> bool:
    """Whether `folder` is an adapter saved by PEFT; a folder that also contains a full model counts as a model."""
    return (folder / ADAPTER_CONFIG).is_file() and not (folder / "config.json").exists()


def check_model_folder(folder: Path) -> None:
    """Refuse a model that is damaged or could run code."""
    if is_adapter(folder):
        raise ModelError(f"{folder} holds an adapter", fix=f"treadle export {folder} --merged DIR makes a model of it")
    if not (folder / "config.json").is_file():
        raise ModelError(f"{folder} holds no config.json", fix="--model takes a folder saved by save_pretrained")
    refuse_code(folder)
    for file in sorted(folder.glob("*.json")):
        if "config" in file.name or file.name in SETTINGS:
            settings = read_settings(file)
            if "config" in file.name and _has_key(settings, "auto_map"):
                raise ModelError(
                    f"{file} asks to run the model's own code (auto_map)", fix="use a model that transformers knows"
                )
    missing = missing_weights(folder)
    if missing:
        raise ModelError(f"{folder} holds no {missing[0]}, which {INDEX} names", fix=REFETCH_FIX)
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelError(f"{folder} holds no *.safetensors weights", fix="save the model with save_pretrained")
    for file in files:
        read_header(file)


def read_settings(file: Path) -> dict[str, Any]:
    """Read a JSON object from a file of a model folder."""
    if not file.is_file():
        raise ModelError(f"{file} is not there, or no file", fix=REFETCH_FIX)
    try:
        return parse_object(file.read_bytes())
    except (OSError, ValueError) as error:
        raise ModelError(f"{file} is damaged: {error}", fix=REFETCH_FIX) from None


def parse_object(raw: bytes) -> dict[str, Any]:
    """Parse a JSON object; raises ValueError for anything else."""
    try:
        value = json.loads(raw)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"it cannot be parsed ({error})") from None
    if not isinstance(value, dict):
        raise ValueError("it holds no JSON object")
    return value


def missing_weights(folder: Path) -> list[str]:
    """Weight files that the index names and the folder lacks."""
    index = folder / INDEX
    if not index.is_file():
        return []
    parts = read_settings(index).get("weight_map")
    if not isinstance(parts, dict) or not all(isinstance(part, str) for part in parts.values()):
        raise ModelError(f"{index} is damaged: it has no weight_map", fix=REFETCH_FIX)
    for part in set(parts.values()):
        if Path(part).name != part or not part.endswith(".safetensors"):
            raise ModelError(f"{index} names {part!r}, which is no safetensors file beside it", fix=REFETCH_FIX)
    return sorted(part for part in set(parts.values()) if not (folder / part).is_file())


def read_header(file: Path) -> dict[str, Any]:
    """{name: {"dtype", "shape", "data_offsets"}} of a safetensors file; its size must match its header."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if not 0 < length <= min(size - 8, MAX_HEADER_BYTES):
                raise ValueError(f"its header would have {length} bytes, the file has {size}")
            header = parse_object(stream.read(length))
        header.pop("__metadata__", None)
        end = 8 + length + max((int(tensor["data_offsets"][1]) for tensor in header.values()), default=0)
        if end != size:
            raise ValueError(f"it has {size} bytes, its header names {end}")
        if not all(isinstance(tensor["shape"], list) for tensor in header.values()):
            raise ValueError("its header has no shapes")
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ModelError(f"{file} is damaged: {error}", fix=REFETCH_FIX) from None
    return header


def refuse_code(folder: Path) -> None:
    """Refuse file types that a library could execute, also in subfolders."""
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in UNREAD_FOLDERS]
        links = [name for name in folders if (Path(parent) / name).is_symlink()]
        if links:
            raise ModelError(f"{Path(parent) / links[0]} is a link to a folder", fix="remove it, or copy the folder")
        for file in (Path(parent) / name for name in sorted(names)):
            if file.suffix.lower() not in HARMLESS_SUFFIXES:
                raise ModelError(
                    f"{folder} holds {file.relative_to(folder)}, which can run code, or is of no kind that a model "
                    "needs",
                    fix="keep only safetensors weights, settings and texts in it; move the rest elsewhere",
                )


def _has_key(settings: object, key: str) -> bool:
    """Whether `key` occurs at any depth. Iterative: json.loads accepts deeper nesting than Python can recurse."""
    pending = [settings]
    while pending:
        value = pending.pop()
        if isinstance(value, dict):
            if key in value:
                return True
            pending += value.values()
        elif isinstance(value, list):
            pending += value
    return False


@dataclass(frozen=True)
class CheckpointFacts:
    """What a model folder says about the model."""

    folder: Path
    dtype: str  # of the checkpoint
    vocab_size: int
    max_positions: int | None
    eos_ids: frozenset[int]
    linear_modules: tuple[str, ...]  # last name components of the layers' matrices: q_proj, down_proj, ...


def read_checkpoint_facts(folder: Path) -> CheckpointFacts:
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
    return CheckpointFacts(
        folder=folder,
        dtype=dtype,
        vocab_size=vocab_size,
        max_positions=None if _has_rope_scaling(config) else config.get("max_position_embeddings"),
        eos_ids=frozenset(eos_ids),
        linear_modules=_linear_modules(folder),
    )


def absolute(path: Path) -> Path:
    """The absolute path: vLLM's working directory may differ."""
    return path.expanduser().resolve()


def _linear_modules(folder: Path) -> tuple[str, ...]:
    """Found by tensor names: those of layers contain a number, those of embeddings and the output do not."""
    found = set()
    for file in sorted(folder.glob("*.safetensors")):
        for name, tensor in read_header(file).items():
            *path, module, leaf = name.split(".")
            if leaf == "weight" and len(tensor["shape"]) == 2 and any(part.isdigit() for part in path):
                found.add(module)
    return tuple(sorted(found))


def _has_rope_scaling(config: dict[str, Any]) -> bool:
    """With RoPE scaling, sequences may exceed max_position_embeddings, by an amount only the model's code knows."""
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(rope, dict):
        raise ModelError(f"config.json has {rope!r} for scaled positions", fix=REFETCH_FIX)
    return rope.get("rope_type", rope.get("type", "default")) != "default"


# ---- adapters
#
# PEFT has about sixty settings. A few rewrite the base model while an adapter is loaded (`init_lora_weights` pissa,
# olora, corda or loftq; `layer_replication`), and unloading does not undo that. Others are supported by only one of the
# engines (`rank_pattern`, `use_dora`, `modules_to_save`). So the accepted settings are listed here, and the engines
# build PEFT's configuration from `AdapterSettings` alone, never from the file.


@dataclass(frozen=True)
class AdapterSettings:
    rank: int
    alpha: float
    uses_rslora: bool  # scale alpha / sqrt(rank) instead of alpha / rank
    target_modules: str | list[str]  # informative: the tensor names decide which layers are adapted
    base_model: str


def read_adapter_settings(folder: Path) -> AdapterSettings:
    """Settings of the adapter in `folder`; raises a RequestError that names every setting that is not accepted."""
    for name in ADAPTER_FILES:
        if not (folder / name).is_file():  # opening a pipe would block
            raise unreadable(folder, f"it holds no file {name}")
    file = folder / ADAPTER_FILES[0]
    try:
        with file.open("rb") as stream:
            raw = stream.read(MAX_CONFIG_BYTES + 1)
        if len(raw) > MAX_CONFIG_BYTES:
            raise ValueError(f"it is larger than {MAX_CONFIG_BYTES >> 20} MiB")
        config = parse_object(raw)
    except (OSError, ValueError) as error:
        raise unreadable(folder, f"{file.name}: {error}") from None
    if config.get("peft_type") != "LORA":
        raise RequestError(
            f"{folder} holds no LoRA adapter but {brief(config.get('peft_type'))}", fix="save one with PEFT"
        )
    _check_settings(file, config)
    return AdapterSettings(
        rank=config["r"],
        alpha=config["lora_alpha"],
        uses_rslora=config.get("use_rslora") is True,
        target_modules=config["target_modules"],
        base_model=config.get("base_model_name_or_path") or "",
    )


def base_model_name(folder: Path, settings: AdapterSettings) -> str:
    """Name of the model that the adapter in `folder` was trained on."""
    if not settings.base_model:
        raise ModelError(
            f"the adapter {folder} does not name the model that it was made for",
            fix=f"write the model's folder or id into {ADAPTER_FILES[0]} as base_model_name_or_path",
        )
    return settings.base_model


def unreadable(folder: Path, why: str) -> RequestError:
    return RequestError(
        f"{folder} cannot be read as a LoRA adapter: {why}",
        fix=f"it must hold {' and '.join(ADAPTER_FILES)}, as PEFT saves them",
    )


def _check_settings(file: Path, config: Mapping[str, Any]) -> None:
    refused = []
    for name, value in (dict.fromkeys(_REQUIRED) | dict(config)).items():
        kind, plain = _PLAIN.get(name, (None, ""))
        try:
            # An unlisted setting, perhaps of a newer PEFT, is accepted if it is off.
            if kind is not None:
                msgspec.convert(value, type=kind)
            elif value is not None and value is not False and value not in ([], {}):
                refused.append(f"{name} is {brief(value)}")
        except msgspec.ValidationError:
            refused.append(f"{name} is {brief(value)} (plain LoRA has {plain})")
    if refused:
        raise RequestError(
            f"{file} has settings that this engine does not serve: {'; '.join(refused[:8])}",
            fix="train with plain LoRA settings; an adapter initialized by PiSSA, OLoRA or the like must be converted "
            "when it is saved (PEFT: path_initial_model_for_weight_conversion)",
        )


_MAX = sys.float_info.max
_FLAG = bool | None, "null or false or true"
_TEXT = str | None, "a text"
_NAMES = str | list[str] | None, "names"

# Types of the accepted values by setting. Settings without effect on a loaded adapter accept any value of their type.
_PLAIN: Mapping[str, tuple[Any, str]] = {
    "peft_type": (Literal["LORA"], '"LORA"'),
    "task_type": (Literal["CAUSAL_LM", None], 'null or "CAUSAL_LM"'),
    "r": (Annotated[int, msgspec.Meta(ge=1)], "a whole number from 1"),
    "lora_alpha": (Annotated[float, msgspec.Meta(ge=-_MAX, le=_MAX)], "a number"),  # finite
    "use_rslora": _FLAG,
    "target_modules": (str | list[str], "names of modules"),
    "bias": (Literal["none", None], 'null or "none"'),
    # overwritten by the saved A and B
    "init_lora_weights": (bool | Literal["gaussian", None], 'null or true or false or "gaussian"'),
    # no effect on a loaded adapter
    "lora_dropout": (Annotated[float, msgspec.Meta(ge=0, le=1)], "a number from 0 to 1"),
    "layers_to_transform": (int | list[int] | None, "numbers of layers"),
    "layers_pattern": _NAMES,
    "exclude_modules": _NAMES,
    "inference_mode": _FLAG,
    "base_model_name_or_path": _TEXT,
    "revision": _TEXT,
    "peft_version": _TEXT,
    "megatron_core": _TEXT,
    "qalora_group_size": (int, "a whole number"),
    "auto_mapping": (dict | None, "a mapping"),
}
_REQUIRED = ("r", "lora_alpha", "target_modules")
