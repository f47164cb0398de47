"""Inside vLLM's worker: what our routes ask of it (middleware.py). Named to vLLM by --worker-extension-cls.

All answers are plain values; a refusal is {"error": ..., "fix": ...}, because an exception would lose its remedy on
the way. Weights go by their Hugging Face names here, as views of the rows that they are in vLLM's parameters.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import safe_open
from torch import Tensor, nn

from treadle.engines.vllm import loader  # noqa: F401 (registers the load format in this process)
from treadle.engines.vllm.loader import SHARED_LAYOUT
from treadle.errors import SyncError, TreadleError
from treadle.sync.fingerprint import fingerprint
from treadle.sync.fused import Shape, Slice, map_fused, place_slices
from treadle.sync.layout import Layout

Answer = dict[str, Any] | None


def _refusals_as_answers(method: Callable[..., Answer]) -> Callable[..., Answer]:
    @functools.wraps(method)
    def answering(self: TreadleWorker, **kwargs: Any) -> Answer:
        try:
            return method(self, **kwargs)
        except TreadleError as error:
            return {"error": error.message, "fix": error.fix}

    return answering


class TreadleWorker:
    """Mixed into vLLM's worker class; `get_model` and `model_config` are the worker's own."""

    model_config: Any
    get_model: Callable[[], nn.Module]

    @_refusals_as_answers
    def treadle_layout(self) -> Answer:
        """Where the weights lie that a trainer may write: in a shared file, or on the GPU. None: not shared."""
        fused = _fused_layout(self)
        if fused is None:
            return None
        plain: dict[str, Any] = msgspec.to_builtins(place_slices(fused, _slices(self)))
        return plain

    @_refusals_as_answers
    def treadle_fingerprints(self, *, policy_version: int) -> Answer:
        return {name: fingerprint(weight, policy_version) for name, weight in _weights(self).items()}

    @_refusals_as_answers
    @torch.no_grad()
    def treadle_load_weights(self, *, folder: str) -> Answer:
        """Take the safetensors of a folder, in place. All names and shapes are checked before anything is written."""
        started = time.monotonic()
        weights = _weights(self)
        tied = _tied_names(self)
        files = sorted(Path(folder).glob("*.safetensors"))
        if not files:
            raise SyncError(f"{folder} holds no *.safetensors weights", fix="save the model with save_pretrained")
        for file in files:
            _refuse_misfits(file, weights, tied)
        num_loaded = 0
        for file in files:
            with safe_open(file, framework="pt") as saved:
                for name in saved.keys():  # noqa: SIM118 (it is no dictionary)
                    if name in weights:
                        weights[name].copy_(saved.get_tensor(name))
                        num_loaded += 1
        return {"num_loaded": num_loaded, "seconds": time.monotonic() - started}

    @_refusals_as_answers
    def treadle_settle(self) -> Answer:
        """Wait for what a GPU still computes: only then is nobody reading the weights."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return None


def _fused_layout(worker: TreadleWorker) -> Layout | None:
    """Where vLLM's own parameters lie, as the loader left them for a trainer."""
    shared: Layout | None = getattr(worker.get_model(), SHARED_LAYOUT, None)
    return shared


def _weights(worker: TreadleWorker) -> dict[str, Tensor]:
    """Views of vLLM's parameters, by Hugging Face name."""
    parameters = dict(worker.get_model().named_parameters())
    for name, parameter in parameters.items():
        if not parameter.is_contiguous() or parameter.dtype != worker.model_config.dtype:
            raise SyncError(f"the engine keeps {name} as {parameter.dtype} in an order of its own")
    slices = _slices(worker)
    return {s.name: parameters[s.source].data[s.first_row : s.first_row + s.shape[0]] for s in slices}


def _slices(worker: TreadleWorker) -> tuple[Slice, ...]:
    model = worker.get_model()
    served = {name: tuple(p.shape) for name, p in model.named_parameters()}
    packed = getattr(model, "packed_modules_mapping", {})
    config = worker.model_config.hf_config
    return map_fused(_wanted(str(worker.model_config.model)), served, packed, vocab_size=config.vocab_size)


@functools.cache
def _wanted(folder: str) -> dict[str, Shape]:
    """Names and shapes of the Hugging Face model that a trainer would build."""
    return {name: tuple(p.shape) for name, p in _empty_model(folder).named_parameters()}


def _tied_names(worker: TreadleWorker) -> set[str]:
    """Names that a checkpoint may carry besides: second names of tied parameters."""
    model = _empty_model(str(worker.model_config.model))
    every = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return every - {name for name, _ in model.named_parameters()}


@functools.cache
def _empty_model(folder: str) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
        return model


def _refuse_misfits(file: Path, weights: dict[str, Tensor], tied: set[str]) -> None:
    try:
        with safe_open(file, framework="pt") as saved:
            shapes = {name: tuple(saved.get_slice(name).get_shape()) for name in saved.keys()}  # noqa: SIM118
    except Exception as error:  # safetensors raises its own error, made in Rust, and OSError
        raise SyncError(f"{file} cannot be read: {error}", fix="save the weights again") from None
    for name, shape in shapes.items():
        if name not in weights and name not in tied:
            raise SyncError(f"{file} holds {name}, which the engine's model does not have", fix="save the same model")
        if name in weights and shape != tuple(weights[name].shape):
            raise SyncError(
                f"{file} holds {name} of the shape {list(shape)}, the engine's is {list(weights[name].shape)}",
                fix="save the same model",
            )
