"""LoRA adapters in a model that serves, by PEFT: several are loaded, the model computes with one of them or with none.

files = read_adapter(path)                 the folder: what it says about itself (read_adapter_head), its tensors
check_adapter(files, model, ...)           nothing is changed unless it fits
adapters.add(name, files); adapters.use(name)
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
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

from treadle.engines.adapter_settings import AdapterSettings, read_adapter_settings, unreadable
from treadle.engines.interface import ADAPTER_FILES
from treadle.engines.model_folder import read_settings
from treadle.engines.weight_updates import REPUBLISH_FIX
from treadle.errors import EngineError, ModelError, RequestError
from treadle.sync.fingerprint import FingerprintCache, begin_fingerprints
from treadle.sync.model_folders import is_called

# PEFT warns that a model gets a second adapter, that one which was in use is deleted, and that an adapter has weights
# for a part of the layers: all of it is intended.
warnings.filterwarnings("ignore", message="Already found a `peft_config`", module="peft")
warnings.filterwarnings("ignore", message="Adapter .* was active which is now deleted", module="peft")
warnings.filterwarnings("ignore", message="While injecting the PEFT adapters, an inconsistency", module="peft")

WRAPPED = "base_model.model."  # what PEFT puts before a weight's name when it saves


class BaseWeightsChanged(EngineError):
    """Loading an adapter has changed the model itself."""


@dataclass(frozen=True)
class AdapterHead:
    """A saved adapter's settings, and the names and shapes of its tensors."""

    path: Path
    settings: AdapterSettings
    shapes: Mapping[str, Sequence[int]]

    @property
    def rank(self) -> int:
        return self.settings.rank


@dataclass(frozen=True)
class AdapterFiles(AdapterHead):
    tensors: Mapping[str, Tensor]


def read_adapter_head(path: Path) -> AdapterHead:
    """Few and small reads: in the engine's process every read waits for its turn beside a busy event loop."""
    settings = read_adapter_settings(path)
    with _errors_as_unreadable(path), safe_open(path / ADAPTER_FILES[1], "pt") as file:
        shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118 - it is no dict
    return AdapterHead(path, settings, shapes)


def read_adapter(path: Path) -> AdapterFiles:
    settings = read_adapter_settings(path)
    with _errors_as_unreadable(path):
        tensors = load_file(path / ADAPTER_FILES[1])
    return AdapterFiles(path, settings, {name: tensor.shape for name, tensor in tensors.items()}, tensors)


@contextmanager
def _errors_as_unreadable(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, SafetensorError) as error:
        raise unreadable(path, f"{ADAPTER_FILES[1]}: {error}") from None


def check_adapter(files: AdapterHead, model: Any, folder: Path, max_rank: int) -> None:
    """Refuse an adapter that is too large, or that was made for another model."""
    rank, base_model = files.rank, files.settings.base_model
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
        place, _, part = name.removeprefix(WRAPPED).rpartition(".lora_")
        weight = _weight_shape(modules.get(place))
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
    _refuse_half(files)


def _weight_shape(module: Any) -> list[int] | None:
    """A quantized weight is packed, so that its own shape says nothing."""
    if isinstance(module, nn.Linear):
        return [module.out_features, module.in_features]
    weight = getattr(module, "weight", None)
    return None if weight is None else list(weight.shape)


def _refuse_half(files: AdapterHead) -> None:
    """PEFT would fill in a matrix that is missing with random numbers."""
    names = set(files.shapes)
    alone = [name for name in names if _other_half(name) not in names]
    if alone or not names:
        what = f"{min(alone)} without {_other_half(min(alone))}" if alone else "no tensors"
        raise RequestError(f"{files.path} has {what}", fix="save the adapter again")


def _other_half(name: str) -> str:
    return name.replace(".lora_A.", ".lora_B.") if ".lora_A." in name else name.replace(".lora_B.", ".lora_A.")


class Adapters:
    """The adapters in one model. It is left as it was until the first one comes."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._is_wrapped = False
        self._used: str | None = None
        self._num_loads = 0
        self._standing = FingerprintCache()

    def add(self, name: str, files: AdapterFiles) -> None:
        """Load it beside the others; what the model computes does not change before `use`.

        PEFT can change any part of the model meanwhile, so the model's own weights are compared with what they were
        before, whether or not the load succeeds.
        """
        self._num_loads += 1  # with each load another part of every weight is read
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
        tensors = {name.removeprefix(WRAPPED): tensor for name, tensor in files.tensors.items()}
        try:
            # With the tensors PEFT takes their names for where the adapter goes, and runs no pattern of the settings.
            inject_adapter_in_model(_peft_config(files), self._model, adapter_name=key, state_dict=tensors)
            outcome = set_peft_model_state_dict(self._model, dict(files.tensors), adapter_name=key)
        except Exception as error:  # PEFT's errors have no common base; it has turned to the adapter already
            self.remove(name)
            self.use(self._used)
            raise RequestError(
                f"{files.path} cannot be loaded: {error}", fix="its tensors must be as its configuration says"
            ) from None
        self._model.eval().requires_grad_(False)
        self.use(self._used)  # PEFT turns to an adapter as soon as it is there
        if outcome.unexpected_keys:  # check_adapter has seen every name; a layer of another kind is left
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
        """Compute with this one, or with none."""
        for layer in self._layers():
            layer.enable_adapters(name is not None)
        if name is not None:
            set_adapter(self._model, _key(name), inference_mode=True)
        self._used = name

    def remove(self, name: str) -> None:
        delete_adapter(self._model, _key(name), prefix="lora_")
        getattr(self._model, "peft_config", {}).pop(_key(name), None)

    def matrices(self, name: str, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """A and B of each layer that it changes, in this number format, B times its scale."""
        key = _key(name)
        for place, layer in self._model.named_modules() if self._is_wrapped else ():
            if isinstance(layer, LoraLayer) and key in layer.lora_A:
                yield f"{place}.lora_A", layer.lora_A[key].weight.to(dtype)
                yield f"{place}.lora_B", layer.lora_B[key].weight.to(dtype) * layer.scaling[key]

    def _layers(self) -> list[Any]:
        return [m for m in self._model.modules() if isinstance(m, LoraLayer)] if self._is_wrapped else []


def _peft_config(files: AdapterHead) -> LoraConfig:
    settings = files.settings
    return LoraConfig(
        r=files.rank,
        lora_alpha=settings.alpha,
        use_rslora=settings.uses_rslora,
        target_modules=sorted({name.rpartition(".lora_")[0].rpartition(".")[2] for name in files.shapes}),
        task_type="CAUSAL_LM",
        inference_mode=True,
    )


def _key(name: str) -> str:
    """PEFT keeps adapters as modules, whose names must not have dots."""
    return "adapter_" + name.encode().hex()


def _is_same_model(named: str, folder: Path) -> bool:
    """Whether an adapter's base is the model in `folder`: by its place, by its name, or by an equal configuration."""
    if not named:
        return True
    other = Path(named)
    if os.path.isdir(other):  # False also for a name that is too long
        return other.resolve() == folder.resolve() or _architecture(other) == _architecture(folder)
    return is_called(named, folder)


def _architecture(folder: Path) -> dict[str, object]:
    """A model's configuration without what every save changes; empty where it cannot be read."""
    try:
        config = read_settings(folder / "config.json")
    except ModelError:
        return {}
    return {
        k: v for k, v in config.items() if k not in ("_name_or_path", "transformers_version", "dtype", "torch_dtype")
    }
