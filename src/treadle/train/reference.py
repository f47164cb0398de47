"""The frozen reference policy of a KL term: the model that training started from.

    with adapters     the policy with its adapters off      no additional memory
    without           a second copy of the model            its weights once more, on the device
    offloaded         a copy in host memory                 one layer at a time on the device

Copies are loaded from the folder of the base model, not from a checkpoint: a resumed run keeps its reference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from treadle.log import get_logger
from treadle.train.model_setup import layer_number
from treadle.train.pack import Micro

if TYPE_CHECKING:
    from peft import PeftModel  # importing it takes a second, so only with adapters

Score = Callable[[Any, Micro], tuple[Tensor, Tensor]]  # (model, micro) -> (logprobs_L, entropy_L)

log = get_logger("reference")


class Reference:
    """`reference(micro)` returns the logprobs_L of `model`, without gradient. `ready` is entered for each call."""

    def __init__(
        self, model: Any, score: Score, ready: Callable[[], AbstractContextManager[object]] = nullcontext
    ) -> None:
        self._model = model
        self._score = score
        self._ready = ready

    @torch.no_grad()
    def __call__(self, micro: Micro) -> Tensor:
        with self._ready():
            return self._score(self._model, micro)[0]


def build_reference(
    score: Score,
    *,
    adapted: PeftModel | None,
    build_copy: Callable[[], Any],
    device: torch.device,
    is_sharded: bool,
    offload: bool,
) -> Reference:
    """`adapted`: the policy's model if it has adapters; otherwise `build_copy` makes one, with the policy's
    attention, so that before the first step both give the same logprobs: `reference(micro)` equals
    `score(policy_model, micro)[0]`. A copy that is sharded over ranks is on its device already.
    """
    if adapted is not None:
        log.info("reference", kind="the policy with its adapters off")
        return Reference(adapted.get_base_model(), score, adapted.disable_adapter)
    model = build_copy().eval().requires_grad_(False)
    if is_sharded:
        log.info("reference", kind="a sharded copy")
        return Reference(model, score)
    if offload and device.type != "cpu":  # on a CPU the weights are in host memory already
        log.info("reference", kind="a copy in host memory")
        return Reference(model, score, offload_to_host(model, device).loaded)
    log.info("reference", kind="a copy on the device")
    return Reference(model.to(device), score)


def offload_to_host(model: nn.Module, device: torch.device) -> OffloadedParameters:
    """Keep the model in host memory: each layer's weights are on the device only while the layer runs.

    Returns the parameters outside of the layers (embeddings, last norm, output layer), which must be loaded during a
    whole score: the output layer's weight is read without calling its module, so no hook could load it.
    """
    for buffer in model.buffers():  # small, and not always inside of a layer
        buffer.data = buffer.data.to(device)
    outer = [p for name, p in model.named_parameters() if layer_number(name) is None]  # a tied parameter appears once
    for name, module in model.named_modules():
        is_layer = layer_number(name) is not None and layer_number(name.rpartition(".")[0]) is None
        if is_layer:
            parameters = OffloadedParameters(module.parameters(), device)
            module.register_forward_pre_hook(lambda *_, p=parameters: p.load())
            module.register_forward_hook(lambda *_, p=parameters: p.offload(), always_call=True)
    return OffloadedParameters(outer, device)


class OffloadedParameters:
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

    @contextmanager
    def loaded(self) -> Iterator[None]:
        self.load()
        try:
            yield
        finally:
            self.offload()
