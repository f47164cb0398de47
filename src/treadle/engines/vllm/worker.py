"""Extend vLLM's worker: a model loader that shares weights with a trainer, and methods that middleware.py calls.

Loader (--load-format treadle): with `weights_file` in --model-loader-extra-config the parameters are moved into that
file, and on a CPU vLLM computes from there. This happens before vLLM warms up, compiles or captures anything, so all of
that uses the final addresses.

Methods (--worker-extension-cls): results are plain values. A refusal is {"error": ..., "fix": ...}, because an
exception would lose its `fix` on the way. Weights have their Hugging Face names here, as views of rows of vLLM's fused
parameters. Each worker of a tensor-parallel vLLM has a part of each weight, and every method runs on all workers.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from vllm.config.load import LoadConfig
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from treadle.engines.vllm.command import LOAD_FORMAT
from treadle.engines.weight_updates import BroadcastReceiver, empty_model, read_weights, write_weights
from treadle.errors import SyncError, TreadleError
from treadle.sync.fingerprint import FingerprintCache, begin_fingerprints, fingerprints
from treadle.sync.gate import PublishGate
from treadle.sync.layout import Layout, Shape, Slice, Worker, map_fused, place_slices
from treadle.sync.shards import HeldWeight
from treadle.sync.shared_memory import share_parameters
from treadle.wire.bridge import JoinGroup

SHARED_LAYOUT = "treadle_shared_layout"  # attribute of a model whose parameters are shared
Result = dict[str, Any] | None
NOT_COMPARED_FIX = "leave these layers out (--lora-target-modules), or set --verify-publish off"


@register_model_loader(LOAD_FORMAT)
class TreadleLoader(DefaultModelLoader):
    """vLLM's safetensors loader, which then moves the parameters into the shared file."""

    def __init__(self, load_config: LoadConfig) -> None:
        extra: dict[str, Any] = dict(load_config.model_loader_extra_config or {})
        self._weights_file: str | None = extra.pop("weights_file", None)
        self._model_folder: str = extra.pop("model_folder", "")
        super().__init__(dataclasses.replace(load_config, load_format="safetensors", model_loader_extra_config=extra))

    def load_model(self, *args: Any, **kwargs: Any) -> nn.Module:
        prepare_cpu()
        model: nn.Module = super().load_model(*args, **kwargs)
        if self._weights_file is not None:
            layout: Layout = share_parameters(model, Path(self._weights_file), self._model_folder)
            setattr(model, SHARED_LAYOUT, layout)
        return model


def prepare_cpu() -> None:
    """Change vLLM's behaviour on a CPU, before it loads a model; on a GPU nothing.

    vLLM would pack each matrix and drop the original, which a trainer could then not read or write. There is no setting
    for this: these are the two switches that vLLM's dispatch checks.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    import vllm._custom_ops as custom_ops
    import vllm.model_executor.layers.utils as layer_utils

    from treadle.engines.vllm.cpu_lora import use_batched_cpu_lora

    for module, switch, off in (
        (custom_ops, "_supports_onednn", False),
        (layer_utils, "check_cpu_sgl_kernel", lambda *_args, **_kwargs: False),
    ):
        if not hasattr(module, switch):
            raise RuntimeError(f"this vLLM has no {module.__name__}.{switch}: it cannot keep weights unpacked on a CPU")
        setattr(module, switch, off)
    use_batched_cpu_lora()


def _refusals_as_answers(method: Callable[..., Result]) -> Callable[..., Result]:
    @functools.wraps(method)
    def answering(self: TreadleWorker, **kwargs: Any) -> Result:
        try:
            return method(self, **kwargs)
        except TreadleError as error:
            return {"error": error.message, "fix": error.fix}

    return answering


class TreadleWorker:
    """Mixed into vLLM's worker class; `get_model` and `model_config` are the worker's own."""

    model_config: Any
    model_runner: Any
    get_model: Callable[[], nn.Module]

    @_refusals_as_answers
    def treadle_layout(self) -> Result:
        """Addresses of the weights that a trainer may write, in a shared file or on the GPU. None: not shared."""
        fused: Layout | None = getattr(self.get_model(), SHARED_LAYOUT, None)  # of vLLM's own parameters
        if fused is None:
            return None
        plain: dict[str, Any] = msgspec.to_builtins(place_slices(fused, _slices(self)))
        return plain

    @_refusals_as_answers
    def treadle_shards(self) -> Result:
        """This worker's part of each weight."""
        return {s.name: msgspec.to_builtins(s.part) for s in _slices(self)}

    @_refusals_as_answers
    def treadle_begin_fingerprints(self, *, policy_version: int) -> Result:
        """Start computing fingerprints without waiting for the GPU.

        vLLM computes no token during a worker call, and the GPU has a step to finish first. By the time
        treadle_read_fingerprints is called it is done, or nearly so.
        """
        standing = self.__dict__.setdefault("treadle_standing", FingerprintCache())
        weights = ((name, held.tensor) for name, held in _weights(self).items())
        begun = begin_fingerprints(weights, policy_version, standing)
        self.__dict__["treadle_begun"] = (policy_version, begun)
        return None

    @_refusals_as_answers
    def treadle_read_fingerprints(self, *, policy_version: int) -> Result:
        begun_version, begun = self.__dict__.pop("treadle_begun", (None, None))
        if begun is None or begun_version != policy_version:
            raise SyncError("vLLM was restarted, or asked for others, while it read its weights", fix="ask again")
        found: dict[str, str] = begun()
        return found

    @_refusals_as_answers
    def treadle_adapter_fingerprints(self, *, adapter_id: int, policy_version: int) -> Result:
        """Fingerprints of an adapter as vLLM stores it in host memory."""
        return dict(fingerprints(_adapter_matrices(self, adapter_id), policy_version))

    @_refusals_as_answers
    def treadle_load_weights(self, *, folder: str, policy_version: int, must_be_all: bool) -> Result:
        """Load the safetensors of a folder in place; everything is checked before anything is written.

        `policy_version`: of the present weights.
        """
        weights = _weights(self)
        weights |= {name: weights[first] for name, first in _tied_names(self).items()}
        found = read_weights(Path(folder), weights, policy_version, must_be_all=must_be_all)
        write_weights(found, weights)
        return {"num_loaded": len(found)}

    @_refusals_as_answers
    def treadle_join(self, *, request: dict[str, Any]) -> Result:
        """Form a process group with a trainer, after checking its weights."""
        _receiver(self).join(msgspec.convert(request, JoinGroup), _weights(self), worker=_position().rank)
        return None

    @_refusals_as_answers
    def treadle_receive(self, *, group: str) -> Result:
        """Receive the trainer's broadcast in place."""
        plain: dict[str, Any] = msgspec.to_builtins(_receiver(self).receive(group, _weights(self)))
        return plain

    @_refusals_as_answers
    def treadle_wait_for_write(self, *, gate: str, number: int) -> Result:
        """Block between two steps until the trainer has written, or until the API process gives up (middleware.py)."""
        opened = PublishGate(Path(gate))
        _synchronize()
        return {"held_s": opened.wait_for_write(number, until_allowed=True)}

    @_refusals_as_answers
    def treadle_synchronize(self) -> Result:
        """Wait for pending GPU work, which may still read the weights."""
        _synchronize()
        return None


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _receiver(worker: TreadleWorker) -> BroadcastReceiver:
    """Created on first use: a worker extension has no constructor of its own."""
    receiver: BroadcastReceiver = worker.__dict__.setdefault("treadle_receiver", BroadcastReceiver())
    return receiver


def _weights(worker: TreadleWorker) -> dict[str, HeldWeight]:
    """Views of vLLM's parameters, by Hugging Face name."""
    parameters = dict(worker.get_model().named_parameters())
    for name, parameter in parameters.items():
        if not parameter.is_contiguous() or parameter.dtype != worker.model_config.dtype:
            raise SyncError(f"the engine keeps {name} as {parameter.dtype} in an order of its own")
    return {s.name: HeldWeight(_view(parameters, s), s.shape, s.part) for s in _slices(worker)}


def _view(parameters: Mapping[str, nn.Parameter], s: Slice) -> Tensor:
    return parameters[s.source].data[s.first_row : s.first_row + s.part_shape[0]]


def _position() -> Worker:
    from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size

    return Worker(get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size())


def _slices(worker: TreadleWorker) -> tuple[Slice, ...]:
    model, config = worker.get_model(), worker.model_config.hf_config
    return map_fused(
        _trainer_shapes(str(worker.model_config.model)),
        {name: tuple(p.shape) for name, p in model.named_parameters()},
        getattr(model, "packed_modules_mapping", {}),
        vocab_size=config.vocab_size,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or 0,
        worker=_position(),
    )


@functools.cache
def _trainer_shapes(folder: str) -> dict[str, Shape]:
    """Names and shapes of the Hugging Face model that a trainer would build."""
    return {name: tuple(p.shape) for name, p in empty_model(Path(folder)).named_parameters()}


def _adapter_matrices(worker: TreadleWorker, adapter_id: int) -> Iterator[tuple[str, Tensor]]:
    """vLLM stores those of fused layers together, in the order of their names; B includes the scale already."""
    manager = worker.model_runner.lora_manager._adapter_manager
    adapter = manager.get_adapter(adapter_id)
    if adapter is None:
        raise SyncError("vLLM has let go of this adapter already", fix="publish less often, or raise --max-cpu-loras")
    for module, kept in adapter.loras.items():
        is_stacked = isinstance(kept.lora_a, list)
        names = manager.packed_modules[module] if is_stacked else [module]
        pairs = list(zip(kept.lora_a, kept.lora_b, strict=True)) if is_stacked else [(kept.lora_a, kept.lora_b)]
        if len(pairs) != len(names):
            raise SyncError(
                f"vLLM keeps the adapter of {module} in a form that is not known here", fix=NOT_COMPARED_FIX
            )
        for name, (matrix_a, matrix_b) in zip(names, pairs, strict=True):
            if matrix_a is not None:
                yield f"{name}.lora_A", matrix_a
                yield f"{name}.lora_B", matrix_b


def _tied_names(worker: TreadleWorker) -> dict[str, str]:
    """Second name -> first name of tied parameters; a checkpoint may use either."""
    model = empty_model(Path(worker.model_config.model))
    first = {id(p): name for name, p in model.named_parameters()}
    return {n: first[id(p)] for n, p in model.named_parameters(remove_duplicate=False) if n != first[id(p)]}
