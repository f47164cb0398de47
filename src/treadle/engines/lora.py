"""Load LoRA adapters into a serving model with PEFT: several may be loaded, at most one is active.

files = read_adapter(path)                 settings, tensor shapes and tensors
check_adapter(files, model, ...)           refuse an adapter that does not fit, before anything changes
adapters.add(name, files); adapters.use(name)
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, inject_adapter_in_model, set_peft_model_state_dict
from peft.functional import delete_adapter, set_adapter
from peft.tuners.lora import LoraLayer
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from treadle.engines.model_folder import (
    ADAPTER_FILES,
    AdapterSettings,
    read_adapter_settings,
    read_settings,
    unreadable,
)
from treadle.engines.weight_updates import REPUBLISH_FIX
from treadle.errors import EngineError, ModelError, RequestError
from treadle.sync.fingerprint import FingerprintCache, begin_fingerprints
from treadle.sync.model_folders import is_called

# PEFT warns about a second adapter, about deleting the active one, and about an adapter for only some layers. All of
# these are intended.
warnings.filterwarnings("ignore", message="Already found a `peft_config`", module="peft")
warnings.filterwarnings("ignore", message="Adapter .* was active which is now deleted", module="peft")
warnings.filterwarnings("ignore", message="While injecting the PEFT adapters, an inconsistency", module="peft")

WRAPPED = "base_model.model."  # prefix of weight names in files saved by PEFT


class BaseWeightsChanged(EngineError):
    """Loading an adapter has changed the base model's weights."""


@dataclass(frozen=True)
class AdapterFiles:
    """A saved adapter: its settings, the shapes of its tensors, and the tensors unless only the header was read."""

    path: Path
    settings: AdapterSettings
    shapes: Mapping[str, Sequence[int]]
    tensors: Mapping[str, Tensor]


def read_adapter(path: Path, *, header_only: bool = False) -> AdapterFiles:
    """`header_only`: reads little, because in the engine process each read competes with the event loop for the GIL."""
    settings, file = read_adapter_settings(path), path / ADAPTER_FILES[1]
    try:
        tensors: Mapping[str, Tensor] = {} if header_only else load_file(file)
        with safe_open(file, "pt") as opened:
            shapes = {name: opened.get_slice(name).get_shape() for name in opened.keys()}  # noqa: SIM118 - it is no dict
    except (OSError, ValueError, SafetensorError) as error:
        raise unreadable(path, f"{file.name}: {error}") from None
    return AdapterFiles(path, settings, shapes, tensors)


def check_adapter(files: AdapterFiles, model: Any, folder: Path, max_rank: int) -> None:
    """Refuse an adapter whose rank is too large, that was made for another model, or that is incomplete."""
    rank, base_model = files.settings.rank, files.settings.base_model
    if rank > max_rank:
        raise RequestError(
            f"{files.path} has rank {rank}, this engine takes up to {max_rank}",
            fix=f"start the engine with --max-lora-rank {rank}",
        )
    if not _is_same_model(base_model, folder):
        raise RequestError(
            f"{files.path} was made for {base_model[:200]}, this engine serves {folder}",
            fix="start the engine with that model, or correct base_model_name_or_path in adapter_config.json",
        )
    modules = {name.replace(".base_layer", ""): module for name, module in model.named_modules()}
    for name, shape in files.shapes.items():
        module_name, _, part = name.removeprefix(WRAPPED).rpartition(".lora_")
        weight = _weight_shape(modules.get(module_name))
        side = {"A.weight": 1, "B.weight": 0}.get(part)
        if weight is None or side is None or len(shape) != 2 or shape[side] != weight[side]:
            other = "it has no such weight" if weight is None else f"its weight there is {weight}"
            raise RequestError(
                f"{files.path} does not fit {folder.name}: {name} is {list(shape)}, {other}",
                fix="use an adapter that was trained on this model",
            )
        if shape[1 - side] != rank:
            raise RequestError(
                f"{files.path} does not fit its own settings: {name} is {list(shape)}, and r is {rank}",
                fix="its tensors must be as adapter_config.json says",
            )
    # Of A without B, or B without A, PEFT would initialize the missing matrix randomly.
    other_half = {
        name: name.replace(".lora_A.", ".lora_B.") if ".lora_A." in name else name.replace(".lora_B.", ".lora_A.")
        for name in files.shapes
    }
    alone = [name for name, other in other_half.items() if other not in other_half]
    if alone or not other_half:
        what = f"{min(alone)} without {other_half[min(alone)]}" if alone else "no tensors"
        raise RequestError(f"{files.path} has {what}", fix="save the adapter again")


def _weight_shape(module: Any) -> list[int] | None:
    """[out, in] of a linear layer; the shape of a quantized weight itself is that of packed data."""
    if isinstance(module, nn.Linear):
        return [module.out_features, module.in_features]
    weight = getattr(module, "weight", None)
    return None if weight is None else list(weight.shape)


class LoraAdapters:
    """The adapters of one model. The model is not modified before the first adapter is added."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._is_wrapped = False
        self._used: str | None = None
        self._num_loads = 0
        self._standing = FingerprintCache()

    def add(self, name: str, files: AdapterFiles) -> None:
        """Load an adapter; it has no effect on the model's output before `use`.

        PEFT could change any part of the model, so fingerprints of the base weights are compared before and after,
        whether or not the load succeeds.
        """
        self._num_loads += 1  # each load fingerprints another part of every weight
        before = self._base_fingerprints()
        try:
            self._inject(name, files)
        finally:
            changed = before.items() ^ self._base_fingerprints().items()
            if changed:
                raise BaseWeightsChanged(
                    f"loading {files.path} has changed the model's own weights, {min(changed)[0]} among them",
                    fix=REPUBLISH_FIX,
                )

    def _inject(self, name: str, files: AdapterFiles) -> None:
        key = _key(name)
        self._is_wrapped = True
        config = LoraConfig(
            r=files.settings.rank,
            lora_alpha=files.settings.alpha,
            use_rslora=files.settings.uses_rslora,
            target_modules=sorted({name.rpartition(".lora_")[0].rpartition(".")[2] for name in files.shapes}),
            task_type="CAUSAL_LM",
            inference_mode=True,
        )
        tensors = {name.removeprefix(WRAPPED): tensor for name, tensor in files.tensors.items()}
        try:
            # With state_dict, PEFT takes the target modules from the tensor names and evaluates no pattern of the file.
            inject_adapter_in_model(config, self._model, adapter_name=key, state_dict=tensors)
            outcome = set_peft_model_state_dict(self._model, dict(files.tensors), adapter_name=key)
        except Exception as error:  # PEFT's errors have no common base class; the adapter is active already
            self.remove(name)
            self.use(self._used)
            raise RequestError(
                f"{files.path} cannot be loaded: {error}", fix="its tensors must be as its configuration says"
            ) from None
        self._model.eval().requires_grad_(False)
        self.use(self._used)  # PEFT activates an adapter when it is loaded
        if outcome.unexpected_keys:  # names were checked, so this is a layer type that PEFT does not support
            self.remove(name)
            raise RequestError(f"{files.path} has weights that nothing takes: {outcome.unexpected_keys[:3]}")

    def _base_fingerprints(self) -> dict[str, str]:
        own = (
            (name.replace(".base_layer.", "."), weight)
            for name, weight in self._model.named_parameters(remove_duplicate=False)
            if ".lora_" not in name
        )
        return begin_fingerprints(own, self._num_loads, self._standing)()

    def use(self, name: str | None) -> None:
        """Activate this adapter, or none."""
        for layer in self._model.modules() if self._is_wrapped else ():
            if isinstance(layer, LoraLayer):
                layer.enable_adapters(name is not None)
        if name is not None:
            set_adapter(self._model, _key(name), inference_mode=True)
        self._used = name

    def remove(self, name: str) -> None:
        delete_adapter(self._model, _key(name), prefix="lora_")
        getattr(self._model, "peft_config", {}).pop(_key(name), None)

    def matrices(self, name: str, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """A and B of each adapted layer in `dtype`, B multiplied by its scale."""
        key = _key(name)
        for module, layer in self._model.named_modules() if self._is_wrapped else ():
            if isinstance(layer, LoraLayer) and key in layer.lora_A:
                yield f"{module}.lora_A", layer.lora_A[key].weight.to(dtype)
                yield f"{module}.lora_B", layer.lora_B[key].weight.to(dtype) * layer.scaling[key]


def _key(name: str) -> str:
    """PEFT stores adapters as modules, whose names must not contain dots."""
    return "adapter_" + name.encode().hex()


def _is_same_model(named: str, folder: Path) -> bool:
    """Whether an adapter's base is the model in `folder`: by path, by name, or by an equal configuration."""
    if not named:
        return True
    other = Path(named)
    if os.path.isdir(other):  # False also for a name that is too long
        return other.resolve() == folder.resolve() or _architecture(other) == _architecture(folder)
    return is_called(named, folder)


def _architecture(folder: Path) -> dict[str, object]:
    """A model's configuration without fields that every save changes; empty if it cannot be read."""
    try:
        config = read_settings(folder / "config.json")
    except ModelError:
        return {}
    return {
        k: v for k, v in config.items() if k not in ("_name_or_path", "transformers_version", "dtype", "torch_dtype")
    }
