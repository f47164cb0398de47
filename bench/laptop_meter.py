"""Read the work and measure steps, for both sides of bench/laptop.py. Needs no installed packages."""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Group:
    """G completions of one prompt, with the logprobs of their tokens and their scores."""

    prompt: str
    prompt_ids: list[int]
    completions: list[list[int]]
    logprobs: list[list[float]]
    rewards: list[float]


@dataclass
class Step:
    """One optimizer step; the norm is that of the whole gradient before it was clipped."""

    wall_s: float
    cpu_s: float
    loss: float = float("nan")
    grad_norm: float = float("nan")


@dataclass
class Meter:
    """`start()` and `stop()` around each step; `report()` at the end of the process."""

    steps: list[Step] = field(default_factory=list)
    _began: tuple[float, float] = (0.0, 0.0)

    def start(self) -> None:
        self._began = (time.perf_counter(), _cpu_s())

    def stop(self) -> Step:
        step = Step(time.perf_counter() - self._began[0], _cpu_s() - self._began[1])
        self.steps.append(step)
        return step

    def report(self) -> None:
        """Print the values of all steps, including the warm-up, as the last line of output."""
        print(json.dumps({"steps": [asdict(step) for step in self.steps], "peak_gb": _peak_gb()}), flush=True)


def read_work(file: Path) -> list[Group]:
    return [Group(**group) for group in json.loads(file.read_text())]


def _cpu_s() -> float:
    """CPU time of all threads of this process, in user code and in the kernel."""
    times = os.times()
    return times.user + times.system


def _peak_gb() -> float:
    """Peak resident memory of this process. ru_maxrss is not used: on Linux it includes the launcher's peak."""
    status = Path("/proc/self/status")
    if status.exists():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024 / 1e9
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9
