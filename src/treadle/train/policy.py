"""The model that is trained: live weights that forwards use, and fp32 masters that the optimizer moves.

      masters (fp32) ──write_live_weights()──> live (bf16, perhaps shared with the engine)
          ^                                        |
          └── optimizer <── fp32 gradients <── backward

A step of 1e-6 is lost when added to a bf16 weight; added to its fp32 master it counts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from treadle.errors import ModelError
from treadle.sync.device import choose_device
from treadle.sync.layout import Layout
from treadle.sync.weights_file import bind_parameters, map_weights
from treadle.train.attention import PackedContext, lay_out, plug_in
from treadle.train.logprobs import chosen_logprobs
from treadle.train.pack import Micro


class Policy:
    """`score(micro)` gives logprobs; gradients of any number of micros add up in the masters, in fp32."""

    def __init__(self, model: Any, *, logprob_chunk: int, shared: dict[str, Tensor] | None = None) -> None:
        if getattr(model.get_output_embeddings(), "bias", None) is not None:
            raise ModelError("the output layer has a bias, which the trainer does not handle", fix="use another model")
        self.model = model
        self._shared = shared or {}  # where an engine reads the weights, when they are not the live ones themselves
        self.device: torch.device = next(model.parameters()).device
        self._chunk = logprob_chunk
        self._context = PackedContext()
        plug_in(model, self._context)
        model.eval()  # no dropout: the rollout policy had none either
        self.live: dict[str, nn.Parameter] = dict(model.named_parameters())
        self.masters: dict[str, nn.Parameter] = {}
        for name, parameter in self.live.items():
            parameter.requires_grad_(True)
            master = nn.Parameter(parameter.detach().float().clone())
            master.grad = torch.zeros_like(master)
            self.masters[name] = master
            parameter.register_post_accumulate_grad_hook(_move_gradient_to(master))
        # A mask with four dimensions tells transformers to build none of its own; our attention ignores it.
        self._no_mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=self.device)

    @property
    def vocab_size(self) -> int:
        return int(self.model.get_input_embeddings().weight.shape[0])

    def score(self, micro: Micro) -> tuple[Tensor, Tensor]:
        """(logprobs_L, entropy_L) of the tokens that carry loss, in fp32."""
        self._context.blocks = lay_out(micro.segments, self.device)
        hidden_TE = self.model.base_model(
            input_ids=micro.token_ids_T[None].to(self.device),
            position_ids=micro.positions_T[None].to(self.device),
            attention_mask=self._no_mask,
            use_cache=False,
        ).last_hidden_state[0]
        return chosen_logprobs(
            hidden_TE[micro.source_L.to(self.device)],
            self.model.get_output_embeddings().weight,
            micro.targets_L.to(self.device),
            micro.temperatures_L.to(self.device),
            chunk=self._chunk,
        )

    def gradients(self) -> list[Tensor]:
        return [m.grad for m in self.masters.values() if m.grad is not None]

    def zero_gradients(self) -> None:
        torch._foreach_zero_(self.gradients())

    @torch.no_grad()
    def write_live_weights(self) -> None:
        for name, master in self.masters.items():
            self.live[name].copy_(master)
        for name, handed_over in self._shared.items():
            handed_over.copy_(self.live[name])


def load_policy(folder: Path, *, dtype: str, device: str, logprob_chunk: int) -> Policy:
    """A policy with weights of its own."""
    kind: Any = "auto" if dtype == "auto" else getattr(torch, dtype)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=kind).to(choose_device(device))
    return Policy(model, logprob_chunk=logprob_chunk)


def share_policy(layout: Layout, *, logprob_chunk: int, device: str = "cpu") -> Policy:
    """A policy whose live weights are the engine's: the model is built empty and bound to the shared bytes.

    Only parameters are left empty; buffers (the rotary frequencies among them) are computed by the model's own code.
    On a GPU the live weights are a copy there, and the shared bytes are written at every publish.
    """
    config = AutoConfig.from_pretrained(layout.model)
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, layout.dtype))
    model.tie_weights()  # emptying gives tied parameters two names; they are one parameter
    bind_parameters(model, layout)
    if choose_device(device).type == "cpu":
        return Policy(model, logprob_chunk=logprob_chunk)
    return Policy(model.to(choose_device(device)), logprob_chunk=logprob_chunk, shared=map_weights(layout))


def _move_gradient_to(master: nn.Parameter) -> Any:
    """A hook that adds a fresh gradient to the master's and frees it: low-precision gradients never pile up."""

    def hook(parameter: Tensor) -> None:
        if parameter.grad is not None and master.grad is not None:
            master.grad.add_(parameter.grad)
            parameter.grad = None

    return hook
