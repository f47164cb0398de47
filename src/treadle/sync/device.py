"""Which device the weights of a process are on, and which library multiplies them on a CPU."""

from __future__ import annotations

import platform
from typing import Any

import torch

ARM = ("aarch64", "arm64")


def choose_device(name: str) -> torch.device:
    """`auto` takes a GPU when there is one."""
    return torch.device(name if name != "auto" else ("cuda" if torch.cuda.is_available() else "cpu"))


def choose_products(model: Any) -> None:
    """On an ARM CPU in float32: multiply with BLAS instead of oneDNN, in this whole process.

    Two Neoverse-N1 cores with torch 2.13, GFLOP/s of a product with 1,536 x 576 weights: 16 rows 43 against 35, 64 rows
    65 against 60, 590 rows 71 against 70. oneDNN is ten times slower for small products in batches, as attention has
    them, and does not keep to the number of threads that torch was given.
    """
    if platform.machine() in ARM and model.device.type == "cpu" and model.dtype == torch.float32:
        torch.backends.mkldnn.set_flags(False)
