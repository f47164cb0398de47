"""What a checkpoint builds on: the model that training began with, and the shape of the adapters.

Weights that are not trained are not restored, they come from the model's folder; and an adapter's scale is a setting.
With another model or another scale the restored numbers would be another policy, without a word. So both are compared.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from treadle.errors import ConfigError
from treadle.sync.model_folders import ModelOrigin

ADAPTER_CONFIG = "adapter_config.json"  # PEFT writes it beside the adapter's weights
ELSEWHERE = "or choose another --train.save-path to start a fresh run"
# What decides which weights adapters have and how they act, by PEFT's names, and our settings of them.
ADAPTER_SETTINGS = {
    "r": "lora-r",
    "lora_alpha": "lora-alpha",
    "target_modules": "lora-target-modules",
    "layers_to_transform": "lora-layer-indices",
}


def refuse_other_model(checkpoint: Path, saved: ModelOrigin, now: ModelOrigin, *, is_frozen: bool) -> None:
    """`is_frozen`: some weights are not trained. When all are, they are restored, and only the config must agree."""
    differs = "another config.json" if saved.config != now.config else ""
    if is_frozen and saved.weights != now.weights:
        differs = "other weights"
    if differs:
        raise ConfigError(
            f"{checkpoint} was trained on a model with {differs} than the one of this run",
            fix=f"set --model to the model that training began with, {ELSEWHERE}",
        )


def refuse_other_adapters(checkpoint: Path, now: Any) -> None:
    """`now` is PEFT's configuration of the adapters in this run; the checkpoint holds that of its own."""
    saved = json.loads((checkpoint / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    for key, flag in ADAPTER_SETTINGS.items():
        before, after = _comparable(saved.get(key)), _comparable(getattr(now, key))
        if before != after:
            remedy = "leave --train.{0} out" if before is None else "set --train.{0} {1}"
            raise ConfigError(
                f"{checkpoint} has adapters with {flag} {_shown(before)}, this run has {_shown(after)}",
                fix=f"{remedy.format(flag, _shown(before))}, {ELSEWHERE}",
            )


def _comparable(value: Any) -> Any:
    """PEFT keeps names as a set and writes them as a list, in any order."""
    return sorted(value) if isinstance(value, (set, list, tuple)) else value


def _shown(value: Any) -> str:
    if value is None:
        return "unset"
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)
