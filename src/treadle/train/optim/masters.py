"""Optimizers that move fp32 masters of the weights.

      masters (fp32) ──write──> live (bf16, perhaps shared with the engine)
          ^                         |
          └── rules <── gradients <── backward

A step of 1e-6 is lost when added to a bf16 weight; added to its fp32 master it counts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from treadle.config import TrainConfig
from treadle.log import get_logger
from treadle.processor import fast_dtype
from treadle.train.gradients import HostBridge
from treadle.train.optim.adafactor import Adafactor, relative_rate
from treadle.train.optim.optimizer import Optimizer, part_of

if TYPE_CHECKING:
    from treadle.train.policy import Policy

log = get_logger("trainer")
Masters = dict[str, nn.Parameter]


class MasterOptimizer(Optimizer):
    """Masters on `device`, each moved by one of the torch optimizers that `rules` makes for them."""

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
        super().__init__(policy, config, device)
        owned = policy.ranks.owned(policy.live)
        self.masters: Masters = {
            name: nn.Parameter(policy.live[name].detach().to(device, torch.float32, copy=True))
            for name in policy.live
            if name in owned
        }
        self._live = policy.live
        self._bridge = HostBridge(policy.live, device)
        self._rules = rules(self.masters) if self.masters else []  # there may be more ranks than parameters
        self._own_rate = rate

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
                # A copy: what was loaded may be a window on a file that is deleted later.
                rule_of[master].state[master][part] = value.to(master.device, copy=True)

    def _rate(self, step: int) -> float:
        return super()._rate(step) if self._own_rate is None else self._own_rate(step)

    def _move(self, rate: float) -> None:
        for rule in self._rules:
            for group in rule.param_groups:
                group["lr"] = rate
        for piece in self._gradients.pieces():  # a rule moves what has a gradient
            for name, gradient in piece.items():
                self.masters[name].grad = gradient
            for rule in self._rules:
                rule.step()
            for name in piece:
                self.masters[name].grad = None
        self.zero_gradients()

    @torch.no_grad()
    def _write(self) -> None:
        for name, master in self.masters.items():
            self._bridge.put(self._live[name], master)
        self._ranks.hand_out(self._live)


def adamw(policy: Policy, config: TrainConfig) -> MasterOptimizer:
    return MasterOptimizer(policy, config, lambda masters: [_adamw_rule(masters, config)])


def adamw_cpu(policy: Policy, config: TrainConfig) -> MasterOptimizer:
    """Everything but the live weights in host memory: the step is slow, and 16 bytes per parameter are saved."""
    host = torch.device("cpu")
    return MasterOptimizer(policy, config, lambda masters: [_adamw_rule(masters, config)], device=host)


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
    """Muon for the matrices inside the layers; AdamW for embeddings, the output layer, and all that is no matrix."""
    tables = {id(table.weight) for table in _vocabulary_tables(policy)}
    is_matrix = {name: p.ndim == 2 and id(p) not in tables for name, p in policy.live.items()}

    def rules(masters: Masters) -> list[torch.optim.Optimizer]:
        matrices = {name: master for name, master in masters.items() if is_matrix[name]}
        others = {name: master for name, master in masters.items() if not is_matrix[name]}
        choice = ((_muon_rule, matrices), (_adamw_rule, others))
        return [rule(part, config) for rule, part in choice if part]  # adapters, for one, are all matrices

    if fast_dtype(policy.device.type) != "bfloat16":
        log.warning(
            "muon_is_slow", reason="it multiplies in bf16, which this processor cannot", fix="--optimizer adamw"
        )
    return MasterOptimizer(policy, config, rules)


def _vocabulary_tables(policy: Policy) -> list[nn.Module]:
    tables = (policy.model.get_input_embeddings(), policy.model.get_output_embeddings())
    return [table for table in tables if table is not None]


def _muon_rule(masters: Masters, config: TrainConfig) -> torch.optim.Optimizer:
    return torch.optim.Muon(
        list(masters.values()),
        lr=config.lr,
        momentum=config.muon_momentum,
        weight_decay=config.weight_decay,
        adjust_lr_fn="match_rms_adamw",  # one learning rate then serves both: steps are as large as AdamW's
    )


def _adamw_rule(masters: Masters, config: TrainConfig) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        list(masters.values()),
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        weight_decay=config.weight_decay,
        fused=True,
    )
