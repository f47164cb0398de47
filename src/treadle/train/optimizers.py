"""Choose the optimizer by name; the training loop knows only `Optimizer`. Those with fp32 masters are defined here.

name         bytes per parameter   state in addition to the bf16 weights and fp32 gradients (6 bytes)
adamw        18                    fp32 masters and two fp32 moments, on the device
adamw_8bit   8.03                  two 8-bit moments; weights are updated in place, with stochastic rounding
adafactor    10                    fp32 masters; the mean square as one row and one column
adamw_cpu    2 (and 16 in host)    the state of adamw and the gradients, in host memory
muon         14                    fp32 masters and one fp32 momentum for matrices; adamw for other parameters

      masters (fp32) ──write──> live (bf16, possibly shared with the engine)
          ^                         |
          └── rules <── gradients <── backward

A step of 1e-6 is lost when added to a bf16 weight, but not when added to its fp32 master.

Adafactor is implemented here, because torch's version always scales the step by the size of the weights. Here that is
optional; without it the step size is exactly the learning rate. (Shazeer and Stern, 2018; no first moment.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from treadle.config import TrainConfig
from treadle.log import get_logger
from treadle.support import fast_dtype
from treadle.train.adamw_8bit import AdamW8bit
from treadle.train.optimizer import Optimizer, PinnedBuffer, part_of

if TYPE_CHECKING:
    from treadle.train.policy import Policy


log = get_logger("trainer")
MUON_MOMENTUM = 0.95  # of the matrices; everything else is moved by AdamW
Masters = dict[str, nn.Parameter]

LARGEST_RELATIVE_RATE = 1e-2
SMALLEST_SCALE = 1e-3  # lets a weight of zero change
EPSILON = 1e-30  # added to squares
DECAY_POWER = -0.8  # step t forgets t**-0.8 of the mean square


def relative_rate(step: int) -> float:
    """Adafactor's own step size instead of a learning rate: 1/sqrt(step), at most 0.01.

    >>> relative_rate(1), relative_rate(40_000)
    (0.01, 0.005)
    """
    return min(LARGEST_RELATIVE_RATE, step**-0.5)


class Adafactor(torch.optim.Optimizer):
    """The mean square of a matrix is stored as one row and one column. `scale_parameter`: multiply the learning rate by
    the root mean square of the weights."""

    def __init__(self, params: Iterable[nn.Parameter], *, weight_decay: float, scale_parameter: bool) -> None:
        super().__init__(params, {"lr": 0.0, "weight_decay": weight_decay, "scale_parameter": scale_parameter})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._move(parameter, parameter.grad, group)

    def _move(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), device=parameter.device)
            if gradient.ndim >= 2:
                state["row_square"] = gradient.new_zeros((*gradient.shape[:-1], 1))
                state["column_square"] = gradient.new_zeros((*gradient.shape[:-2], 1, gradient.shape[-1]))
            else:
                state["square"] = torch.zeros_like(gradient)
        state["step"] += 1
        fresh = state["step"] ** DECAY_POWER  # stays on the device, without synchronization
        square = gradient.square().add_(EPSILON)
        if gradient.ndim >= 2:
            row = state["row_square"].lerp_(square.mean(-1, keepdim=True), fresh)
            column = state["column_square"].lerp_(square.mean(-2, keepdim=True), fresh)
            update = torch.mul(row / row.mean(-2, keepdim=True), column, out=square).rsqrt_().mul_(gradient)
        else:
            update = state["square"].lerp_(square, fresh).rsqrt().mul_(gradient)
        size = group["lr"] / _root_mean_square(update).clamp(min=1.0)  # clips the update's RMS to 1
        if group["scale_parameter"]:
            size = size * _root_mean_square(parameter).clamp(min=SMALLEST_SCALE)
        parameter.mul_(1 - group["lr"] * group["weight_decay"]).sub_(update.mul_(size))


def _root_mean_square(tensor: Tensor) -> Tensor:
    return torch.linalg.vector_norm(tensor) / tensor.numel() ** 0.5


class MasterOptimizer(Optimizer):
    """Masters on `device`, updated by the torch optimizers that `rules` creates for them."""

    def __init__(
        self,
        policy: Policy,
        config: TrainConfig,
        rules: Callable[[Masters], list[torch.optim.Optimizer]],
        *,
        device: torch.device | None = None,
        rate: Callable[[int], float] | None = None,
    ) -> None:
        device = device or policy.device
        super().__init__(policy, config, device, rate)
        owned = policy.ranks.owned(policy.live)
        self.masters: Masters = {
            name: nn.Parameter(policy.live[name].detach().to(device, torch.float32, copy=True))
            for name in policy.live
            if name in owned
        }
        self._live = policy.live
        self._buffer = PinnedBuffer(policy.live, device)
        self._rules = rules(self.masters) if self.masters else []  # there may be more ranks than parameters

    def state(self) -> dict[str, Tensor]:
        tensors = super().state() | {f"master.{name}": master.detach() for name, master in self.masters.items()}
        for rule in self._rules:
            for name, master in self.masters.items():
                for part, value in rule.state.get(master, {}).items():
                    tensors[f"{part}.{name}"] = value
        return tensors

    @torch.no_grad()
    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        saved = part_of(tensors, "master", self.masters)
        super().load_state(tensors)
        for name, value in saved.items():
            self.masters[name].copy_(value)
        for rule in self._rules:
            rule.state.clear()
        rule_of = {p: rule for rule in self._rules for group in rule.param_groups for p in group["params"]}
        for key, value in tensors.items():
            part, _, name = key.partition(".")
            if name in self.masters and part not in ("master", "live"):
                master = self.masters[name]
                # A copy: a loaded tensor may be a memory map of a file that is deleted later.
                rule_of[master].state[master][part] = value.to(master.device, copy=True)

    def _move(self, rate: float) -> None:
        for rule in self._rules:
            for group in rule.param_groups:
                group["lr"] = rate
        for piece in self._gradients.pieces():  # torch optimizers update only parameters with a gradient
            for name, gradient in piece.items():
                self.masters[name].grad = gradient
            for rule in self._rules:
                rule.step()
            for name in piece:
                self.masters[name].grad = None
        self._gradients.zero()

    @torch.no_grad()
    def _write(self) -> None:
        for name, master in self.masters.items():
            self._buffer.put(self._live[name], master)
        self._ranks.broadcast_weights(self._live)


def adamw(policy: Policy, config: TrainConfig, device: torch.device | None = None) -> MasterOptimizer:
    """`device` "cpu": everything except the live weights is in host memory. Steps are slow, and 16 bytes per parameter
    less are on the GPU."""
    return MasterOptimizer(policy, config, lambda masters: [_adamw_rule(masters, config)], device=device)


def _adamw_rule(masters: Masters, config: TrainConfig) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        list(masters.values()),
        lr=config.lr,
        betas=config.betas,
        weight_decay=config.weight_decay,
        fused=True,
    )


def adafactor(policy: Policy, config: TrainConfig) -> MasterOptimizer:
    return MasterOptimizer(
        policy,
        config,
        lambda masters: [
            Adafactor(
                list(masters.values()),
                weight_decay=config.weight_decay,
                scale_parameter=config.adafactor_scale_parameter,
            )
        ],
        rate=relative_rate if config.adafactor_relative_step else None,
    )


def muon(policy: Policy, config: TrainConfig) -> MasterOptimizer:
    """Muon for the matrices inside of the layers; AdamW for embeddings, the output layer, and vectors."""
    tables = (policy.model.get_input_embeddings(), policy.model.get_output_embeddings())
    outer = {id(table.weight) for table in tables if table is not None}
    is_matrix = {name: p.ndim == 2 and id(p) not in outer for name, p in policy.live.items()}

    def rules(masters: Masters) -> list[torch.optim.Optimizer]:
        matrices = [master for name, master in masters.items() if is_matrix[name]]
        others = {name: master for name, master in masters.items() if not is_matrix[name]}
        chosen: list[torch.optim.Optimizer] = []
        if matrices:
            chosen.append(
                torch.optim.Muon(
                    matrices,
                    lr=config.lr,
                    momentum=MUON_MOMENTUM,
                    weight_decay=config.weight_decay,
                    adjust_lr_fn="match_rms_adamw",  # makes one learning rate fit both optimizers
                )
            )
        return [*chosen, _adamw_rule(others, config)] if others else chosen  # adapters have only matrices

    if fast_dtype(policy.device.type) != "bfloat16":
        log.warning(
            "muon_is_slow", reason="it multiplies in bf16, which this processor cannot", fix="--optimizer adamw"
        )
    return MasterOptimizer(policy, config, rules)


OPTIMIZERS: Mapping[str, Callable[[Policy, TrainConfig], Optimizer]] = {
    "adamw": adamw,
    "adamw_8bit": AdamW8bit,
    "adafactor": adafactor,
    "adamw_cpu": partial(adamw, device=torch.device("cpu")),
    "muon": muon,
}


def build_optimizer(policy: Policy, config: TrainConfig) -> Optimizer:
    """Build the optimizer `config.optimizer` for the trainable parameters of `policy`."""
    return OPTIMIZERS[config.optimizer](policy, config)
