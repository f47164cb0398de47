"""Torch's random generators: what they are about to give, to be saved and put back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from treadle.train.stop import StopRequested


def random_state() -> dict[str, Tensor]:
    states = {"random.cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states |= {f"random.cuda.{n}": state for n, state in enumerate(torch.cuda.get_rng_state_all())}
    return states


def restore_random_state(tensors: Mapping[str, Tensor]) -> None:
    if "random.cpu" in tensors:  # the first release saved none
        torch.set_rng_state(tensors["random.cpu"].clone())
    for device in range(torch.cuda.device_count()):
        if f"random.cuda.{device}" in tensors:
            torch.cuda.set_rng_state(tensors[f"random.cuda.{device}"].clone(), device)


@contextmanager
def undone_by_a_stop() -> Iterator[None]:
    """Around a part of a step: stopped in its middle, it has drawn nothing (for dropouts), and can be done again."""
    before = random_state()
    try:
        yield
    except StopRequested:
        restore_random_state(before)
        raise
