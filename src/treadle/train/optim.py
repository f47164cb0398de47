"""AdamW on fp32 masters, with warm-up and a schedule for the learning rate."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from treadle.config import TrainConfig
from treadle.errors import TrainingError
from treadle.train.policy import Policy

MAX_SKIPPED = 5


def learning_rate(step: int, config: TrainConfig) -> float:
    """The rate of optimizer step `step` (1 is the first): linear warm-up, then the schedule down to the last step.

    >>> from treadle.config import TrainConfig
    >>> c = TrainConfig(lr=3.0, warmup_steps=3, steps=10, schedule="constant")
    >>> [learning_rate(s, c) for s in (1, 2, 3, 4)]
    [1.0, 2.0, 3.0, 3.0]
    """
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    done = (step - 1 - config.warmup_steps) / max(1, config.steps - config.warmup_steps)
    left = 1 - done if config.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done))
    return config.lr * max(left, 0.0)


class Optimizer:
    """One step at a time; its state can be saved and restored tensor by tensor."""

    def __init__(self, policy: Policy, config: TrainConfig) -> None:
        self._policy = policy
        self._config = config
        self.num_skipped_in_a_row = 0
        self._adamw = torch.optim.AdamW(
            list(policy.masters.values()),
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            weight_decay=config.weight_decay,
            fused=True,
        )

    def step(self, step: int) -> tuple[float, float]:
        """Clip, move the masters, forget the gradients; returns (gradient norm before clipping, learning rate).

        A gradient of exactly zero (no group had anything to teach) moves nothing: momentum alone is not evidence. One
        that is not finite moves nothing either; five of those in a row end the training.
        """
        rate = learning_rate(step, self._config)
        norm = clip_gradients(self._policy.gradients(), self._config.max_grad_norm)
        self.num_skipped_in_a_row = 0 if math.isfinite(norm) else self.num_skipped_in_a_row + 1
        if self.num_skipped_in_a_row >= MAX_SKIPPED:
            raise TrainingError(
                f"the gradient was not a finite number in {MAX_SKIPPED} steps in a row; the weights were left alone",
                fix="lower --train.lr, or look at the rewards and logprobs of the last batches",
            )
        if math.isfinite(norm) and norm > 0:
            for group in self._adamw.param_groups:
                group["lr"] = rate
            self._adamw.step()
        self._policy.zero_gradients()
        return norm, rate

    def state(self) -> dict[str, Tensor]:
        """Every tensor of the optimizer, by name; empty before the first step."""
        tensors = {}
        for name, master in self._policy.masters.items():
            for part, value in self._adamw.state.get(master, {}).items():
                tensors[f"{part}.{name}"] = value
        return tensors

    def load_state(self, tensors: dict[str, Tensor]) -> None:
        parts: dict[str, dict[str, Any]] = {}
        for key, value in tensors.items():
            part, _, name = key.partition(".")
            parts.setdefault(name, {})[part] = value.to(self._policy.device)
        for name, master in self._policy.masters.items():
            if name in parts:
                self._adamw.state[master] = parts[name]


def clip_gradients(gradients: Iterable[Tensor], max_norm: float) -> float:
    """Scale gradients in place to at most `max_norm`; returns the norm they had."""
    grads = list(gradients)
    norm = float(torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads))))
    if math.isfinite(norm) and norm > max_norm:
        torch._foreach_mul_(grads, max_norm / norm)
    return norm
