"""What a checkpoint builds on: the model that training began with, and the shape of the adapters.

Weights that are not trained are not restored, they come from the model's folder; and an adapter's scale is a setting.
With another model or another scale the restored numbers would be another policy, without a word. So both are compared.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import msgspec

from treadle.errors import ConfigError
from treadle.train.durable import sha256

ADAPTER_CONFIG = "adapter_config.json"  # PEFT writes it beside the adapter's weights
ELSEWHERE = "or choose another --train.save-path to begin anew"
NUM_SAMPLES = 64  # per file of weights
SAMPLE_BYTES = 4096
# What decides which weights adapters have and how they act, by PEFT's names, and our settings of them.
ADAPTER_SETTINGS = {
    "r": "lora-r",
    "lora_alpha": "lora-alpha",
    "target_modules": "lora-target-modules",
    "layers_to_transform": "lora-layer-indices",
}


class ModelOrigin(msgspec.Struct, frozen=True, kw_only=True):
    """A model folder, recognised wherever it lies."""

    config: str  # sha256 of config.json
    weights: str  # sha256 of the names, shapes and places of its weights, and of samples of their values


def origin_of(folder: Path) -> ModelOrigin:
    """Cheap: of a large model a few hundred kilobytes are read.

    >>> origin_of(Path("model"))  # doctest: +SKIP
    ModelOrigin(config='5fd8...', weights='a3b1...')
    """
    digest = hashlib.sha256()
    for file in sorted(folder.glob("model*.safetensors")):
        _add_samples(digest, file)
    config = folder / "config.json"
    return ModelOrigin(config=sha256(config) if config.is_file() else "", weights=digest.hexdigest())


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


def _add_samples(digest: Any, file: Path) -> None:
    """Two models that differ only in their values (a base and its fine-tune, say) have one header: so look at both."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        header_bytes = min(int.from_bytes(stream.read(8), "little"), size)
        digest.update(stream.read(header_bytes))
        start = stream.tell()
        for number in range(NUM_SAMPLES):
            stream.seek(start + (size - start) * number // NUM_SAMPLES)
            digest.update(stream.read(SAMPLE_BYTES))


def _comparable(value: Any) -> Any:
    """PEFT keeps names as a set and writes them as a list, in any order."""
    return sorted(value) if isinstance(value, (set, list, tuple)) else value


def _shown(value: Any) -> str:
    if value is None:
        return "unset"
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)
