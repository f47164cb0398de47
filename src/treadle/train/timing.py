"""Measure the time of each part of a step, throughput, and model FLOPs utilization."""

from __future__ import annotations

import time

import psutil  # type: ignore[import-untyped]
import torch

from treadle.train.checkpoint import Restored, Totals
from treadle.train.pack import PackedBatch
from treadle.train.policy import Policy

# bf16 matrix products per second according to a GPU's data sheet, dense, in 1e12.
PEAK_TFLOPS = {
    "H200": 989, "H100 PCIe": 756, "H100": 989, "GH200": 989, "B200": 2250, "B300": 2250, "A100": 312, "L40S": 362,
    "L40": 181, "L4": 121, "A10G": 70, "A40": 150, "RTX 5090": 210, "RTX 4090": 165, "RTX 3090": 71, "RTX A6000": 155,
}  # fmt: skip


def peak_flops(device: torch.device) -> float | None:
    """bf16 operations per second of this GPU; None if its data sheet is not known, and on a CPU."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((tflops * 1e12 for card, tflops in PEAK_TFLOPS.items() if card in name), None)


class StepTimer:
    """Times of one step by part; a repeated name adds up."""

    def __init__(self) -> None:
        self._start = self._last = time.monotonic()
        self.laps: dict[str, float] = {}

    def lap(self, name: str) -> None:
        now = time.monotonic()
        self.laps[name] = self.laps.get(name, 0.0) + now - self._last
        self._last = now

    @property
    def total_s(self) -> float:
        return self._last - self._start


class ThroughputMeter:
    """Rates of a run, and totals that continue after a resume."""

    def __init__(self, policy: Policy, restored: Restored) -> None:
        self._policy = policy
        self._peak = peak_flops(policy.device)  # of one rank
        self._before_s = restored.elapsed_s
        self._started = time.monotonic()
        self._num_tokens = restored.num_tokens

    @property
    def elapsed_s(self) -> float:
        return self._before_s + time.monotonic() - self._started

    def totals(self) -> Totals:
        return Totals(elapsed_s=self.elapsed_s, num_tokens=self._num_tokens)

    def metrics(self, batch: PackedBatch, clock: StepTimer, *, epochs: int) -> dict[str, float]:
        """`epochs`: passes over the batch."""
        forwarded = batch.num_forwarded_tokens * epochs
        compute_s = clock.laps["fwd_bwd_s"]
        self._num_tokens += batch.num_tokens
        ranks = self._policy.ranks
        values = {
            "time_s": self.elapsed_s,
            "num_tokens": float(self._num_tokens),
            "perf/step_s": clock.total_s,
            **{f"perf/{name}": seconds for name, seconds in clock.laps.items()},
            "perf/forwarded_tok_s_fwd_bwd": forwarded / compute_s,
            "perf/forwarded_tok_s_wall_clock": forwarded / clock.total_s,
            "perf/trained_tok_s_wall_clock": batch.num_loss_tokens / clock.total_s,
            "perf/generated_tok_s_wall_clock": sum(batch.completion_lengths) / clock.total_s,
            "perf/cpu_memory_used_gb": ranks.total_number(psutil.Process().memory_info().rss / 1e9),
        }
        if self._policy.device.type == "cuda":
            values["perf/max_memory_allocated_gb"] = ranks.largest_number(
                torch.cuda.max_memory_allocated(self._policy.device) / 1e9
            )
        if self._peak is not None:
            flops = self._policy.flops_per_token * forwarded
            values["perf/mfu_fwd_bwd"] = flops / compute_s / (self._peak * ranks.size)
            values["perf/mfu_wall_clock"] = flops / clock.total_s / (self._peak * ranks.size)
        return values
