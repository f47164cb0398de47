"""The frozen policy that a KL term stays near: the one training began with.

    with adapters     the policy itself, adapters off       no memory of its own
    without           a second copy of the model            its weights once more, on the device
    offloaded         the same, weights in host memory      one layer at a time on the device

Copies are made from the folder of the base model, never from a checkpoint: a resumed run keeps its reference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from treadle.log import get_logger
from treadle.train.pack import Micro
from treadle.train.trainable import layer_number

if TYPE_CHECKING:
    from peft import PeftModel  # not imported where there are no adapters: it takes a second

Score = Callable[[Any, Micro], tuple[Tensor, Tensor]]  # (model, micro) -> (logprobs_L, entropy_L), as for the policy
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
    """The reference that fits: `adapted` is the policy's model when it has adapters, else a copy is made.

    `folder` is the base model's; `prepare` does to the copy what was done to the policy (its attention), so that
    before the first step both give the same logprobs: `reference(micro)` equals `score(policy_model, micro)[0]`.
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
    """The policy's own model without its adapters, which are on again afterwards."""

    def __init__(self, adapted: PeftModel, score: Score) -> None:
        self._adapted = adapted
        self._score = score

    @torch.no_grad()
    def __call__(self, micro: Micro) -> Tensor:
        with self._adapted.disable_adapter():
            return self._score(self._adapted.get_base_model(), micro)[0]


class FrozenCopy:
    """A model of its own that nothing trains."""

    def __init__(self, model: Any, score: Score) -> None:
        self._model = model.eval().requires_grad_(False)
        self._score = score

    @torch.no_grad()
    def __call__(self, micro: Micro) -> Tensor:
        return self._score(self._model, micro)[0]


class HostCopy:
    """A frozen copy in host memory: each layer's weights are on the device while the layer runs and no longer.

    What stands outside of the layers (embeddings, last norm, output layer) is there during a whole score, because the
    output layer's weight is read without a call of its module, where no hook could bring it.
    """

    def __init__(self, model: Any, score: Score, device: torch.device) -> None:
        self._copy = FrozenCopy(model, score)
        for buffer in model.buffers():  # small, and not always inside of a layer
            buffer.data = buffer.data.to(device)
        named = list(model.named_parameters())  # a tied parameter comes once
        self._outer = _Visitors((p for name, p in named if layer_number(name) is None), device)
        for layer in _layers(model):
            visitors = _Visitors(layer.parameters(), device)
            layer.register_forward_pre_hook(lambda *_, v=visitors: v.bring())
            layer.register_forward_hook(lambda *_, v=visitors: v.send_home(), always_call=True)

    def __call__(self, micro: Micro) -> Tensor:
        self._outer.bring()
        try:
            return self._copy(micro)
        finally:
            self._outer.send_home()


class _Visitors:
    """Parameters whose home is host memory. The device's copy is dropped, not copied back: nothing changes it."""

    def __init__(self, parameters: Iterable[nn.Parameter], device: torch.device) -> None:
        self._device = device
        # Pinned memory is copied by the device itself, while the host goes on to queue the layer's work.
        pinned = device.type == "cuda"
        self._homes = [(p, p.data.pin_memory() if pinned else p.data) for p in parameters]
        self.send_home()

    def bring(self) -> None:
        for parameter, home in self._homes:
            parameter.data = home.to(self._device, non_blocking=True, copy=True)

    def send_home(self) -> None:
        for parameter, home in self._homes:
            parameter.data = home


def _layers(model: nn.Module) -> list[nn.Module]:
    """The numbered layers themselves, without the modules inside of them."""
    return [
        module
        for name, module in model.named_modules()
        if layer_number(name) is not None and layer_number(name.rpartition(".")[0]) is None
    ]
