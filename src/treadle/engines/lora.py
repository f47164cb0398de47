"""LoRA adapters in a model that serves, by PEFT: several are loaded, the model computes with one of them or with none.

files = read_adapter(path)                 the folder: what it says about itself (read_adapter_head), its tensors
check_adapter(files, model, ...)           nothing is changed unless it fits
adapters.add(name, files); adapters.use(name)
"""

from __future__ import annotations

import json
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
from torch import Tensor

from treadle.engines.port import ADAPTER_FILES
from treadle.errors import RequestError

# PEFT warns that a model gets a second adapter, and that one which was in use is deleted: that is what we are here for.
warnings.filterwarnings("ignore", message="Already found a `peft_config`", module="peft")
warnings.filterwarnings("ignore", message="Adapter .* was active which is now deleted", module="peft")

WRAPPED = "base_model.model."  # what PEFT puts before a weight's name when it saves


@dataclass(frozen=True)
class AdapterHead:
    """What a saved adapter says about itself."""

    path: Path
    config: LoraConfig
    shapes: Mapping[str, Sequence[int]]  # of its tensors, by name

    @property
    def rank(self) -> int:
        return max([self.config.r, *self.config.rank_pattern.values()])

    @property
    def base_model(self) -> str:
        return self.config.base_model_name_or_path or ""


@dataclass(frozen=True)
class AdapterFiles(AdapterHead):
    tensors: Mapping[str, Tensor]


def read_adapter_head(path: Path) -> AdapterHead:
    """Few and small reads: in the engine's process every read waits for its turn beside a busy event loop."""
    with _told_as_unreadable(path):
        settings, weights = (path / name for name in ADAPTER_FILES)
        told = json.loads(settings.read_text())
        if told.get("peft_type") != "LORA":
            raise RequestError(f"{path} holds no LoRA adapter but {told.get('peft_type')}", fix="save one with PEFT")
        config = LoraConfig.from_pretrained(str(path))
        with safe_open(weights, "pt") as file:
            shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118 - it is no dict
    config.inference_mode = True
    return AdapterHead(path, config, shapes)


def read_adapter(path: Path) -> AdapterFiles:
    head = read_adapter_head(path)
    with _told_as_unreadable(path):
        tensors = load_file(path / ADAPTER_FILES[1])
    return AdapterFiles(path, head.config, {name: tensor.shape for name, tensor in tensors.items()}, tensors)


@contextmanager
def _told_as_unreadable(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, AttributeError, TypeError, SafetensorError) as error:
        raise RequestError(
            f"{path} cannot be read as a LoRA adapter: {error}",
            fix=f"it must hold {' and '.join(ADAPTER_FILES)}, as PEFT saves them",
        ) from None


def check_adapter(files: AdapterHead, model: Any, folder: Path, max_rank: int) -> None:
    """Refuse an adapter that is too large, or that was made for another model."""
    if files.rank > max_rank:
        raise RequestError(
            f"{files.path} has rank {files.rank}, this engine takes up to {max_rank}",
            fix=f"start the engine with --max-lora-rank {files.rank}",
        )
    if not _is_same_model(files.base_model, folder):
        raise RequestError(
            f"{files.path} was made for {files.base_model}, this engine serves {folder}",
            fix="start the engine with that model, or correct base_model_name_or_path in adapter_config.json",
        )
    modules = {name.replace(".base_layer", ""): module for name, module in model.named_modules()}
    for name, shape in files.shapes.items():
        place, _, part = name.removeprefix(WRAPPED).rpartition(".lora_")
        weight = getattr(modules.get(place), "weight", None)
        side = {"A.weight": 1, "B.weight": 0}.get(part)
        if weight is None or side is None or len(shape) != 2 or shape[side] != weight.shape[side]:
            other = "it has no such weight" if weight is None else f"its weight there is {list(weight.shape)}"
            raise RequestError(
                f"{files.path} does not fit {folder.name}: {name} is {list(shape)}, {other}",
                fix="use an adapter that was trained on this model",
            )


class Adapters:
    """The adapters in one model. It is left as it was until the first one comes."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._is_wrapped = False
        self._used: str | None = None

    def add(self, name: str, files: AdapterFiles) -> None:
        """Load it beside the others; what the model computes does not change before `use`."""
        key = _key(name)
        self._is_wrapped = True
        try:
            inject_adapter_in_model(files.config, self._model, adapter_name=key)
            outcome = set_peft_model_state_dict(self._model, dict(files.tensors), adapter_name=key)
        except (RuntimeError, ValueError, KeyError) as error:  # PEFT has turned to it already
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


def _key(name: str) -> str:
    """PEFT keeps adapters as modules, whose names must not have dots."""
    return "adapter_" + name.encode().hex()


def _is_same_model(named: str, folder: Path) -> bool:
    """Whether an adapter's base is the model in `folder`: by its place, by its name, or by an equal configuration."""
    if not named:
        return True
    other = Path(named).expanduser()
    if other.is_dir():
        return other.resolve() == folder.resolve() or _architecture(other) == _architecture(folder)
    in_cache = f"models--{named.replace('/', '--')}"  # how a folder fetched from the model hub is called
    return other.name.lower() == folder.name.lower() or in_cache in folder.parts


def _architecture(folder: Path) -> dict[str, object]:
    """What a model's configuration says, less what is written anew with every save."""
    try:
        told = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        return {}
    return {k: v for k, v in told.items() if k not in ("_name_or_path", "transformers_version", "dtype", "torch_dtype")}
