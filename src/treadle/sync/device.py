"""Which device the weights of a process are on, and which library multiplies them on a CPU."""

from __future__ import annotations

import math
import platform
import time

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from treadle.log import get_logger

log = get_logger("device")
ARM = ("aarch64", "arm64")
CLEARLY_FASTER = 1.25  # smaller differences are noise, and a choice that changes would change a run's rounding


def choose_device(name: str) -> torch.device:
    """`auto` takes a GPU when there is one."""
    return torch.device(name if name != "auto" else ("cuda" if torch.cuda.is_available() else "cpu"))


def choose_products(model: nn.Module, num_rows: int) -> None:
    """On an ARM CPU in float32: let plain BLAS multiply where it is faster than oneDNN for products of `num_rows` rows.

    There torch gives `x @ weight.T` to oneDNN, which rearranges the weight in every call; with few rows that takes
    longer than the product itself. Holds for the whole process.
    """
    weight = next((module.weight for module in model.modules() if isinstance(module, nn.Linear)), None)
    if platform.machine() not in ARM or weight is None or weight.device.type != "cpu" or weight.dtype != torch.float32:
        return
    gflop = 2 * num_rows * weight.numel() / 1e9
    speed = {onednn: gflop / _best_time_s(weight, num_rows, onednn=onednn) for onednn in (True, False)}
    is_onednn = CLEARLY_FASTER * speed[True] >= speed[False]
    torch.backends.mkldnn.set_flags(is_onednn)
    log.info(
        "products_chosen",
        by="oneDNN" if is_onednn else "BLAS",
        onednn_gflop_s=speed[True],
        blas_gflop_s=speed[False],
        rows=num_rows,
    )


@torch.inference_mode()
def _best_time_s(weight: Tensor, num_rows: int, *, onednn: bool) -> float:
    torch.backends.mkldnn.set_flags(onednn)
    rows = torch.ones(num_rows, weight.shape[1])
    best = math.inf
    for _ in range(8):  # the first ones warm up; the best one was disturbed least
        started = time.perf_counter()
        linear(rows, weight)
        best = min(best, time.perf_counter() - started)
    return best
