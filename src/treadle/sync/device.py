"""Which device the weights of a process are on."""

from __future__ import annotations

import torch


def choose_device(name: str) -> torch.device:
    """`auto` takes a GPU when there is one."""
    return torch.device(name if name != "auto" else ("cuda" if torch.cuda.is_available() else "cpu"))
