"""Run `treadle run` in a test, as a user would."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.e2e.processes import environment, last_lines

# The echo task with settings under which a random model learns within a minute on one core. Engine and trainer work
# side by side, where more can go wrong than when they take turns as in the default job.
TINY_RUN = (
    "--env.name", "echo", "--env.task", "digits", "--env.group-size", "16", "--env.max-token-length", "2",
    "--env.num-eval", "10", "--train.batch-size", "160", "--train.lr", "2e-3", "--train.checkpoint-interval", "2",
    "--engine.dtype", "float32", "--engine.max-num-seqs", "160", "--env.max-age", "1", "--plain",
)  # fmt: skip


def command(output: Path, *flags: str) -> list[str]:
    return [sys.executable, "-m", "treadle", "run", "--output", str(output), *flags]


def run_treadle(
    output: Path, *flags: str, timeout_s: float = 300, cores: int | None = None
) -> tuple[subprocess.CompletedProcess[str], Path]:
    """Run to the end, on `cores` cores; returns the finished process and the run's folder."""
    affinity = ["taskset", "--cpu-list", ",".join(map(str, range(cores)))] if cores else []
    result = subprocess.run(
        [*affinity, *command(output, *flags)],
        capture_output=True, text=True, env=environment(), timeout=timeout_s, check=False,
    )  # fmt: skip
    return result, newest_run(output)


def resume(run: Path, *flags: str, timeout_s: float = 300) -> subprocess.CompletedProcess[str]:
    """Continue a run to its end."""
    words = [sys.executable, "-m", "treadle", "run", "--resume", str(run), "--plain", *flags]
    return subprocess.run(words, capture_output=True, text=True, env=environment(), timeout=timeout_s, check=False)


def ending(result: subprocess.CompletedProcess[str], run: Path) -> str:
    """What a failed test shows of a run: the launcher names the process that failed and shows the end of its log."""
    last_output = last_lines(result.stdout + result.stderr)
    return f"exit code {result.returncode}\n{last_output}\n--- the logs of all processes: {run / 'logs'}"


def newest_run(output: Path) -> Path:
    runs = sorted(p for p in output.iterdir() if p.is_dir() and p.name[:1].isdigit()) if output.is_dir() else []
    return runs[-1] if runs else output / "none"


def metrics_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def values_by_step(run: Path) -> dict[int, tuple[float, ...]]:
    """What training computed; a step that was taken again after a restart counts once."""
    names = ("loss", "reward", "grad_norm")
    return {row["step"]: tuple(row.get(name, 0.0) for name in names) for row in metrics_of(run) if "step" in row}
