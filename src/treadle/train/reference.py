"""The frozen reference policy of a KL term: the model that training started from.

    with adapters     the policy with its adapters off      no additional memory
    without           a second copy of the model            its weights once more, on the device
    offloaded         a copy in host memory                 one layer at a time on the device

Copies are loaded from the folder of the base model, not from a checkpoint: a resumed run keeps its reference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from treadle.log import get_logger
from treadle.train.model_setup import layer_number
from treadle.train.pack import Micro

if TYPE_CHECKING:
    from peft import PeftModel  # importing it takes a second, so only with adapters

Score = Callable[[Any, Micro], tuple[Tensor, Tensor]]  # (model, micro) -> (logprobs_L, entropy_L)
Reference = Callable[[Micro], Tensor]  # micro -> logprobs_L, without gradient

log = get_logger("reference")


def build_reference(
    score: Score,
    *,
    adapted: PeftModel | None,
    folder: Path,
    dtype: torch.dtype,
    device: torch.device,
    offload: bool,
    prepare: Callable[[Any], None],
) -> Reference:
    """`adapted`: the policy's model if it has adapters; otherwise a copy is made from `folder`, the base model's.

    `prepare` installs the policy's attention in the copy, so that before the first step both give the same logprobs:
    `reference(micro)` equals `score(policy_model, micro)[0]`.
    """
    if adapted is not None:
        log.info("reference", kind="the policy with its adapters off")
        return AdaptersOff(adapted, score)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    prepare(model)
    if offload and device.type != "cpu":  # on a CPU the weights are in host memory already
        log.info("reference", kind="a copy in host memory", folder=str(folder))
        return HostCopy(model, score, device)
    log.info("reference", kind="a copy on the device", folder=str(folder))
    return FrozenCopy(model.to(device), score)


class AdaptersOff:
    """The policy's model with its adapters switched off during the call."""

    def __init__(self, adapted: PeftModel, score: Score) -> None:
        self._adapted = adapted
        self._score = score

    @torch.no_grad()
    def __call__(self, micro: Micro) -> Tensor:
        with self._adapted.disable_adapter():
            return self._score(self._adapted.get_base_model(), micro)[0]


class FrozenCopy:
    """A separate model that is not trained."""

    def __init__(self, model: Any, score: Score) -> None:
        self._model = model.eval().requires_grad_(False)
        self._score = score

    @torch.no_grad()
    def __call__(self, micro: Micro) -> Tensor:
        return self._score(self._model, micro)[0]


class HostCopy:
    """A frozen copy in host memory: each layer's weights are on the device only while the layer runs.

    Parameters outside of the layers (embeddings, last norm, output layer) are on the device during a whole score,
    because the output layer's weight is read without calling its module, so no hook could load it.
    """

    def __init__(self, model: Any, score: Score, device: torch.device) -> None:
        self._copy = FrozenCopy(model, score)
        for buffer in model.buffers():  # small, and not always inside of a layer
            buffer.data = buffer.data.to(device)
        named = list(model.named_parameters())  # a tied parameter appears once
        self._outer = _OffloadedParameters((p for name, p in named if layer_number(name) is None), device)
        for layer in _layers(model):
            parameters = _OffloadedParameters(layer.parameters(), device)
            layer.register_forward_pre_hook(lambda *_, p=parameters: p.load())
            layer.register_forward_hook(lambda *_, p=parameters: p.offload(), always_call=True)

    def __call__(self, micro: Micro) -> Tensor:
        self._outer.load()
        try:
            return self._copy(micro)
        finally:
            self._outer.offload()


class _OffloadedParameters:
    """Parameters in host memory. The device's copy is dropped, not copied back: nothing changes it."""

    def __init__(self, parameters: Iterable[nn.Parameter], device: torch.device) -> None:
        self._device = device
        # Pinned memory is copied asynchronously, while the host queues the layer's work.
        pinned = device.type == "cuda"
        self._on_host = [(p, p.data.pin_memory() if pinned else p.data) for p in parameters]
        self.offload()

    def load(self) -> None:
        for parameter, data in self._on_host:
            parameter.data = data.to(self._device, non_blocking=True, copy=True)

    def offload(self) -> None:
        for parameter, data in self._on_host:
            parameter.data = data


def _layers(model: nn.Module) -> list[nn.Module]:
    """The numbered layers, without the modules inside of them."""
    return [
        module
        for name, module in model.named_modules()
        if layer_number(name) is not None and layer_number(name.rpartition(".")[0]) is None
    ]
