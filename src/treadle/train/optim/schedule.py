"""The learning rate of each step."""

from __future__ import annotations

import math

from treadle.config import TrainConfig


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
