"""What every optimizer does: judge the gradient, clip it, and hand it to its own way of moving the weights."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from treadle.config import TrainConfig
from treadle.errors import TrainingError
from treadle.train.gradients import Gradients
from treadle.train.optim.schedule import learning_rate

if TYPE_CHECKING:
    from treadle.train.policy import Policy

MAX_SKIPPED_IN_A_ROW = 5
COUNTERS = ("num_skipped", "num_skipped_in_a_row")


@dataclass(frozen=True)
class StepOutcome:
    grad_norm: float  # before clipping
    learning_rate: float
    skipped: bool  # the loss or the gradient was not a finite number: nothing moved
    num_skipped: int  # steps of which that was so, since the training began
    num_skipped_in_a_row: int

    def metrics(self) -> dict[str, float]:
        return {
            "grad_norm": self.grad_norm,
            "learning_rate": self.learning_rate,
            "skipped_steps": float(self.num_skipped),
            "skipped_in_a_row": float(self.num_skipped_in_a_row),
        }


class Optimizer(ABC):
    """`step(n)` takes the gradients that backward left; publishing the policy puts the result into the live weights.

    An engine may be reading the live weights, so they change only inside `_write`, which the policy calls while the
    engine is held. Publish after every step.
    """

    def __init__(self, policy: Policy, config: TrainConfig, device: torch.device) -> None:
        self.name: str = config.optimizer
        self.num_skipped = 0
        self.num_skipped_in_a_row = 0
        self._config = config
        self._ranks = policy.ranks
        self._gradients = Gradients(policy.live, getattr(torch, config.gradient_dtype), device, policy.ranks)
        policy.on_publish(self._write)

    @property
    def gradients(self) -> Mapping[str, Tensor]:
        """What backward has added up since the last step, by the parameter's name."""
        return self._gradients.by_name

    def zero_gradients(self) -> None:
        self._gradients.zero()

    def step(self, step: int, *, loss_is_finite: bool = True) -> StepOutcome:
        """Clip and move; `step` counts from 1.

        A gradient of exactly zero (no group had anything to teach) moves nothing: momentum alone is not evidence. A
        loss or gradient that is not finite moves nothing either; five of those in a row end the training.
        """
        rate = self._rate(step)
        self._gradients.collect()
        norm = self._gradients.norm()
        skipped = not (loss_is_finite and math.isfinite(norm))
        if skipped:
            self._skip()
        else:
            self.num_skipped_in_a_row = 0
            if norm > self._config.max_grad_norm:
                self._gradients.scale(self._config.max_grad_norm / norm)
            if norm > 0:
                self._move(rate)
        return StepOutcome(norm, rate, skipped, self.num_skipped, self.num_skipped_in_a_row)

    def state(self) -> dict[str, Tensor]:
        """Every tensor of this rank that the next step depends on, by name, counters among them.

        `<part>.<parameter's name>` belongs to the parameter; all else (counters, random generators) to the rank.
        """
        return {f"counter.{name}": torch.tensor(getattr(self, name)) for name in COUNTERS}

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over what `state` gave, and `live.<name>` of the weights it belongs to; publish after it."""
        for name in COUNTERS:  # the first release wrote none
            setattr(self, name, int(tensors.get(f"counter.{name}", 0)))

    def _skip(self) -> None:
        self.zero_gradients()
        self.num_skipped += 1
        self.num_skipped_in_a_row += 1
        if self.num_skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
            raise TrainingError(
                f"the loss or the gradient was not a finite number in {MAX_SKIPPED_IN_A_ROW} steps in a row; "
                "the weights were left alone",
                fix="lower --train.lr, or look at the rewards and logprobs of the last batches",
            )

    def _rate(self, step: int) -> float:
        return learning_rate(step, self._config)

    @abstractmethod
    def _move(self, rate: float) -> None:
        """Take the step with the clipped gradients, or leave it to `_write`; zero the gradients once they are used."""

    @abstractmethod
    def _write(self) -> None:
        """Put the last step into the live weights."""


def part_of(tensors: Mapping[str, Tensor], part: str, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors `<part>.<name>`, checked to be exactly those of `like`, of the same shapes."""
    found = {key.removeprefix(f"{part}."): value for key, value in tensors.items() if key.startswith(f"{part}.")}
    wrong = [name for name in found.keys() | like.keys() if name not in found or name not in like]
    wrong += [name for name in found.keys() & like.keys() if found[name].shape != like[name].shape]
    if wrong:
        raise TrainingError(
            f"the checkpoint does not fit what is trained now: {len(wrong)} tensors differ, {sorted(wrong)[0]} for one",
            fix="resume with the model, layers and adapters it was saved with, or choose another --train.save-path",
        )
    return found
