"""Adafactor: Adam's mean square of a matrix, remembered as one row and one column.

Ours, because torch's always scales the step by the size of the weights; here that is a choice, and without it the step
size is exactly the learning rate. (Shazeer and Stern, 2018; no first moment.)
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

LARGEST_RELATIVE_RATE = 1e-2
SMALLEST_SCALE = 1e-3  # a weight that is zero must be able to leave it
EPSILON = 1e-30  # added to squares
DECAY_POWER = -0.8  # step t forgets t**-0.8 of the mean square


def relative_rate(step: int) -> float:
    """Adafactor's own step size, which needs no learning rate: 1/sqrt(step), at most 0.01.

    >>> relative_rate(1), relative_rate(40_000)
    (0.01, 0.005)
    """
    return min(LARGEST_RELATIVE_RATE, step**-0.5)


class Adafactor(torch.optim.Optimizer):
    """`scale_parameter` multiplies the learning rate by the root mean square of the weights it moves."""

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
        fresh = state["step"] ** DECAY_POWER  # stays on the device: nothing here waits for it
        square = gradient.square().add_(EPSILON)
        if gradient.ndim >= 2:
            row = state["row_square"].lerp_(square.mean(-1, keepdim=True), fresh)
            column = state["column_square"].lerp_(square.mean(-2, keepdim=True), fresh)
            update = torch.mul(row / row.mean(-2, keepdim=True), column, out=square).rsqrt_().mul_(gradient)
        else:
            update = state["square"].lerp_(square, fresh).rsqrt().mul_(gradient)
        size = group["lr"] / _root_mean_square(update).clamp(min=1.0)  # an update is never longer than signs would be
        if group["scale_parameter"]:
            size = size * _root_mean_square(parameter).clamp(min=SMALLEST_SCALE)
        parameter.mul_(1 - group["lr"] * group["weight_decay"]).sub_(update.mul_(size))


def _root_mean_square(tensor: Tensor) -> Tensor:
    return torch.linalg.vector_norm(tensor) / tensor.numel() ** 0.5
