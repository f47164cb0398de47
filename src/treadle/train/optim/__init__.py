"""Choose the optimizer by name; the training loop knows only `Optimizer`.

name         bytes per parameter   state in addition to the bf16 weights and fp32 gradients (6 bytes)
adamw        18                    fp32 masters and two fp32 moments, on the device
adamw_8bit   8.03                  two 8-bit moments; weights are updated in place, with stochastic rounding
adafactor    10                    fp32 masters; the mean square as one row and one column
adamw_cpu    2 (and 16 in host)    the state of adamw and the gradients, in host memory
muon         14                    fp32 masters and one fp32 momentum for matrices; adamw for other parameters
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from treadle.config import TrainConfig
from treadle.train.optim.eight_bit import AdamW8bit
from treadle.train.optim.masters import adafactor, adamw, adamw_cpu, muon
from treadle.train.optim.optimizer import MAX_SKIPPED_IN_A_ROW, Optimizer, StepOutcome, learning_rate

if TYPE_CHECKING:
    from treadle.train.policy import Policy

OPTIMIZERS: Mapping[str, Callable[[Policy, TrainConfig], Optimizer]] = {
    "adamw": adamw,
    "adamw_8bit": AdamW8bit,
    "adafactor": adafactor,
    "adamw_cpu": adamw_cpu,
    "muon": muon,
}

__all__ = ["MAX_SKIPPED_IN_A_ROW", "OPTIMIZERS", "Optimizer", "StepOutcome", "build_optimizer", "learning_rate"]


def build_optimizer(policy: Policy, config: TrainConfig) -> Optimizer:
    """Build the optimizer `config.optimizer` for the trainable parameters of `policy`."""
    return OPTIMIZERS[config.optimizer](policy, config)
