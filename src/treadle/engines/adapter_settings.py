"""Read adapter_config.json, and accept plain LoRA settings only.

PEFT has about sixty settings. A few rewrite the base model while an adapter is loaded (`init_lora_weights` pissa,
olora, corda or loftq; `layer_replication`), and unloading does not undo that. Others are supported by only one of the
engines (`rank_pattern`, `use_dora`, `modules_to_save`). So the accepted settings are listed here, and the engines build
PEFT's configuration from `AdapterSettings` alone, never from the file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from reprlib import repr as brief
from typing import Any

from treadle.engines.interface import ADAPTER_FILES
from treadle.engines.model_folder import parse_object
from treadle.errors import ModelError, RequestError

MAX_CONFIG_BYTES = 1 << 20


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
    for name, (is_plain, plain) in _PLAIN.items():
        if name in config or name in _REQUIRED:
            value = config.get(name)
            if not is_plain(value):
                refused.append(f"{name} is {brief(value)} (plain LoRA has {plain})")
    # An unlisted setting, perhaps of a newer PEFT, is accepted if it is off.
    refused += [
        f"{name} is {brief(value)}" for name, value in config.items() if name not in _PLAIN and not _is_off(value)
    ]
    if refused:
        raise RequestError(
            f"{file} has settings that this engine does not serve: {'; '.join(refused[:8])}",
            fix="train with plain LoRA settings; an adapter initialized by PiSSA, OLoRA or the like must be converted "
            "when it is saved (PEFT: path_initial_model_for_weight_conversion)",
        )


def _is_off(value: object) -> bool:
    return value is None or value is False or value in ([], {})


def _is_whole(value: object) -> bool:
    return type(value) is int


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and math.isfinite(value)  # type: ignore[arg-type]


def _is_text(value: object) -> bool:
    return value is None or isinstance(value, str)


def _is_names(value: object) -> bool:
    return isinstance(value, str) or (isinstance(value, list) and all(isinstance(name, str) for name in value))


def _is_layers(value: object) -> bool:
    return value is None or _is_whole(value) or (isinstance(value, list) and all(map(_is_whole, value)))


def _one_of(*values: object) -> tuple[Callable[[object], bool], str]:
    def is_one(value: object) -> bool:
        return any(value is known or (isinstance(value, str) and value == known) for known in values)

    return is_one, " or ".join(json.dumps(value) for value in values)


_FLAG = _one_of(None, False, True)
_TEXT = _is_text, "a text"
_NAMES = (lambda value: value is None or _is_names(value)), "names"

# Accepted values by setting. Settings without effect on a loaded adapter accept any value of their type.
_PLAIN: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "peft_type": _one_of("LORA"),
    "task_type": _one_of(None, "CAUSAL_LM"),
    "r": (lambda value: _is_whole(value) and value >= 1, "a whole number from 1"),
    "lora_alpha": (_is_number, "a number"),
    "use_rslora": _FLAG,
    "target_modules": (_is_names, "names of modules"),
    "bias": _one_of(None, "none"),
    "init_lora_weights": _one_of(None, True, False, "gaussian"),  # overwritten by the saved A and B
    # no effect on a loaded adapter
    "lora_dropout": (lambda value: _is_number(value) and 0 <= value <= 1, "a number from 0 to 1"),
    "layers_to_transform": (_is_layers, "numbers of layers"),
    "layers_pattern": _NAMES,
    "exclude_modules": _NAMES,
    "inference_mode": _FLAG,
    "base_model_name_or_path": _TEXT,
    "revision": _TEXT,
    "peft_version": _TEXT,
    "megatron_core": _TEXT,
    "qalora_group_size": (_is_whole, "a whole number"),
    "auto_mapping": (lambda value: value is None or isinstance(value, dict), "a mapping"),
}
_REQUIRED = ("r", "lora_alpha", "target_modules")
