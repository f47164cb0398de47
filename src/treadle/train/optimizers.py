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

A step of 1e-6 is lost when added to a bf16 weight, but not when added to its fp32 master. The masters are written with
a rounding that loses no part of a step on average (`write_rounded`).

Adafactor is implemented here, because torch's version always scales the step by the size of the weights. Here that is
optional; without it the step size is exactly the learning rate. (Shazeer and Stern, 2018; no first moment.)
"""

from __future__ import annotations

import math
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
from treadle.train.sharding import join_parts, own_part, own_rows, shard_like, whole

if TYPE_CHECKING:
    from treadle.train.policy import Policy


log = get_logger("trainer")
MUON_MOMENTUM = 0.95  # of the matrices; everything else is moved by AdamW
NEWTON_SCHULZ, NUM_ITERATIONS = (3.4445, -4.775, 2.0315), 5  # as in torch.optim.Muon
SMALLEST_NORM = 1e-7
ADAMW_RMS = 0.2  # of AdamW's usual update: with it one learning rate fits both optimizers
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
                state["row_square"] = torch.zeros_like(gradient[..., :1])  # sharded like it, as after a restore
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


class Muon(torch.optim.Optimizer):
    """Momentum whose matrices are made orthogonal: torch.optim.Muon with Nesterov momentum and the step size of AdamW.

    Torch's version would exchange parts of a sharded matrix in each of 15 products. Here a matrix is gathered once, and
    every rank computes the same products, so that several ranks round as one does.
    """

    def __init__(self, params: Iterable[nn.Parameter], *, weight_decay: float) -> None:
        super().__init__(params, {"lr": 0.0, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._move(parameter, parameter.grad, group["lr"], group["weight_decay"])

    def _move(self, parameter: Tensor, gradient: Tensor, rate: float, decay: float) -> None:
        state = self.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        momentum = state["momentum_buffer"].lerp_(gradient, 1 - MUON_MOMENTUM)
        update = orthogonalized(whole(gradient.lerp(momentum, MUON_MOMENTUM)))
        size = rate * ADAMW_RMS * max(parameter.shape) ** 0.5
        own_part(parameter).mul_(1 - rate * decay).add_(update[own_rows(parameter)], alpha=-size)


def orthogonalized(matrix: Tensor) -> Tensor:
    """The matrix with singular values of about 1, in bf16, by Newton-Schulz iterations (Jordan, 2024)."""
    a, b, c = NEWTON_SCHULZ
    x = matrix.bfloat16()
    x = x.T if x.shape[0] > x.shape[1] else x
    x = x / x.norm().clamp(min=SMALLEST_NORM)
    for _ in range(NUM_ITERATIONS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if matrix.shape[0] > matrix.shape[1] else x


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
        self.masters: Masters = {
            name: nn.Parameter(join_parts(p, own_part(p).detach().to(device, torch.float32, copy=True)))
            for name, p in policy.live.items()
        }
        self._live = policy.live
        self._buffer = PinnedBuffer(policy.live, device)
        self._rules = rules(self.masters)

    def state(self) -> dict[str, Tensor]:
        tensors = super().state() | {f"master.{name}": master.detach() for name, master in self.masters.items()}
        for rule in self._rules:
            for name, master in self.masters.items():
                for part, value in rule.state.get(master, {}).items():
                    tensors[f"{part}.{name}"] = value
        return tensors

    @torch.no_grad()
    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        for name, value in part_of(tensors, "master", self.masters):
            master = self.masters[name]
            own_part(master).copy_(value[own_rows(master)] if value.ndim else value)
        super().load_state(tensors)
        for rule in self._rules:
            rule.state.clear()
        rule_of = {p: rule for rule in self._rules for group in rule.param_groups for p in group["params"]}
        for key in tensors:
            part, _, name = key.partition(".")
            if name in self.masters and part not in ("master", "live"):
                master = self.masters[name]
                # A copy: a loaded tensor may be a memory map of a file that is deleted later.
                rule_of[master].state[master][part] = shard_like(master, tensors[key], own_part(master).device)

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
            live = self._live[name]
            first = own_rows(live).start * math.prod(live.shape[1:])
            self._buffer.put(own_part(live), own_part(master), first)


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
            chosen.append(Muon(matrices, weight_decay=config.weight_decay))
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
