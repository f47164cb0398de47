"""`treadle export`: write what a run has trained as an ordinary model folder, with its adapter merged in."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from peft import PeftModel
from transformers import AutoModelForCausalLM

from treadle.engines.adapter_settings import base_of, read_adapter_settings
from treadle.engines.model_folder import is_adapter
from treadle.engines.models import resolve_model
from treadle.errors import ConfigError
from treadle.launch.folder import is_run, result_of
from treadle.train.durable import write_folder
from treadle.train.lora import merged_weights, original_weights
from treadle.train.model_files import FULL, write_model


def export_merged(source: Path, target: Path) -> None:
    """Write the model of `source` (the folder of a run, an adapter or a model) to the new folder `target`."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target} exists and is not an empty folder", fix="name another one with --merged")
    result = result_of(source) if is_run(source) else source
    if is_adapter(result):
        base = resolve_model(base_of(result, read_adapter_settings(result)))
        fill = _merged(base, result)
    else:
        fill = _copied(resolve_model(str(result)))
    target.parent.mkdir(parents=True, exist_ok=True)
    write_folder(target.parent, target.name, fill)


def _merged(base: Path, adapter: Path) -> Callable[[Path], None]:
    """The sum is computed in fp32 and saved in the model's own number format, as the trainer's merge_final does."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype="auto")
    adapted = PeftModel.from_pretrained(model, adapter)
    weights = {name: weight.detach() for name, weight in original_weights(adapted).items()}
    weights |= dict(merged_weights(adapted))
    return lambda folder: write_model(folder, weights, base)


def _copied(model: Path) -> Callable[[Path], None]:
    """Copy the model's files only; other files, such as the trainer's state in a checkpoint, are left out."""

    def fill(folder: Path) -> None:
        for file in model.iterdir():
            if file.name in FULL.copied or ".safetensors" in file.suffixes:
                shutil.copyfile(file, folder / file.name)

    return fill
