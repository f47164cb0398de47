"""Compare one GRPO step of a 135M model on a CPU with TRL: python bench/laptop.py

Both sides get the same 8 prompts with the same 8 recorded completions each, about 20 tokens long, and do the same with
them: advantages, forward, backward, clipping, and one AdamW update of every parameter. Nothing is generated. Each side
runs in separate processes, alternating, so that noise on the machine affects both; nothing else should run meanwhile.
scripts/setup-trl.sh installs TRL; without it, use --ours-only.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from treadle.config.section import DEFAULT_MODEL
from treadle.launch.preflight import prepare_model

BENCH = Path(__file__).resolve().parent
TRL_PYTHON = BENCH.parent / ".venv-trl" / "bin" / "python"
# Tolerances for bf16 rounding in a step of this size; different work would differ far more.
LOSS_TOLERANCE = 0.01
NORM_TOLERANCE = 0.05  # of the norm
_NOT_PASSED_ON = ("PYTHONDONTWRITEBYTECODE", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT")


@dataclass
class Row:
    """One configuration of one side. `steps` are those after the warm-up, of all its runs."""

    side: str
    configuration: str
    threads: int
    flags: tuple[str, ...] = ()
    steps: list[dict[str, float]] = field(default_factory=list)
    peak_gb: float = 0.0
    first_loss: float = math.nan  # of the very first step: both sides then have the same weights
    first_grad_norm: float = math.nan

    def median(self, name: str) -> float:
        return statistics.median(step[name] for step in self.steps)


def ours(threads: Sequence[int]) -> list[Row]:
    return [Row("treadle", "defaults", n) for n in threads]


def trl(threads: Sequence[int], *, which: str) -> list[Row]:
    """The plain configuration (a batch at once), fast and small ones with weights in fp32 and in bf16, the smallest.

    "plain": only the first; "every": also those that were not faster, or need more memory for the same time.
    """
    autocast = ("--autocast",)  # TRL's own defaults: fp32 weights, and products in bf16
    bfloat16 = ("--weights", "bfloat16")  # no fp32 masters: an update smaller than 1/256 of a weight is lost
    recompute = ("--gradient-checkpointing",)
    chosen = [
        ("bf16 autocast, 64 at once", (*autocast, "--micro-batch", "64")),
        ("bf16 autocast, 8 at once", (*autocast, "--micro-batch", "8")),
        ("bf16 weights, 8 at once", (*bfloat16, "--micro-batch", "8")),
        ("bf16 weights, 8 at once, recomputing", (*bfloat16, *recompute, "--micro-batch", "8")),
    ]
    further = [
        ("bf16 autocast, 16 at once", (*autocast, "--micro-batch", "16")),
        ("bf16 autocast, 8 at once, recomputing", (*autocast, *recompute, "--micro-batch", "8")),
        ("fp32, 8 at once", ("--micro-batch", "8")),
        ("bf16 weights, 64 at once", (*bfloat16, "--micro-batch", "64")),
        ("bf16 weights, 16 at once", (*bfloat16, "--micro-batch", "16")),
    ]
    rows = {"plain": chosen[:1], "best": chosen, "every": chosen + further}[which]
    return [Row("TRL", name, n, flags) for n in threads for name, flags in rows]


def run(command: Sequence[str | Path], threads: int) -> str:
    """The output of a process with `threads` threads; they wait by spinning, the default of OpenMP."""
    environment = {
        **{name: value for name, value in os.environ.items() if name not in _NOT_PASSED_ON},
        "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads),
    }  # fmt: skip
    done = subprocess.run([*map(str, command)], env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(map(str, command))} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    return done.stdout


def measure(row: Row, model: Path, work: Path, num_steps: int) -> None:
    """One run of one row: a warm-up step, then `num_steps` measured ones."""
    script, python = (BENCH / "laptop_ours.py", sys.executable)
    if row.side == "TRL":
        script, python = (BENCH / "laptop_trl.py", str(TRL_PYTHON))
    arguments: list[str | Path] = [
        "--model", model, "--work", work, "--steps", str(num_steps + 1), "--threads", str(row.threads), *row.flags,
    ]  # fmt: skip
    report = json.loads(run([python, script, *arguments], row.threads).splitlines()[-1])
    first, *others = report["steps"]
    row.steps += others
    row.peak_gb = max(row.peak_gb, report["peak_gb"])
    row.first_loss, row.first_grad_norm = first["loss"], first["grad_norm"]


def differences(rows: Sequence[Row]) -> list[str]:
    """Differences that show that two rows did not do the same work; empty if they did."""
    reference = rows[0]
    found = []
    for row in rows[1:]:
        name = f"{row.side}, {row.configuration}"
        if not abs(row.first_loss - reference.first_loss) <= LOSS_TOLERANCE:
            found.append(f"{name}: loss {row.first_loss:.4f}, expected {reference.first_loss:.4f}")
        if not abs(row.first_grad_norm / reference.first_grad_norm - 1) <= NORM_TOLERANCE:
            found.append(f"{name}: gradient norm {row.first_grad_norm:.3f}, expected {reference.first_grad_norm:.3f}")
    return found


def table(rows: Sequence[Row]) -> str:
    """The table as Markdown. Ratios are against Treadle's fastest row."""
    best = min((row for row in rows if row.side == "treadle"), key=lambda row: row.median("wall_s"))
    lines = [
        "| | threads | CPU s | wall s | peak GB | CPU | wall | memory | loss | gradient norm |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        cpu_s, wall_s = row.median("cpu_s"), row.median("wall_s")
        ratios = (cpu_s / best.median("cpu_s"), wall_s / best.median("wall_s"), row.peak_gb / best.peak_gb)
        lines.append(
            f"| {row.side}, {row.configuration} | {row.threads} | {cpu_s:.1f} | {wall_s:.1f} | {row.peak_gb:.1f} | "
            + " | ".join(f"{ratio:.1f}x" for ratio in ratios)
            + f" | {row.first_loss:.4f} | {row.first_grad_norm:.3f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL, help="the default model, or a folder")
    parser.add_argument("--threads", type=int, nargs="+", default=[2], help="each side is measured with each")
    parser.add_argument("--steps", type=int, default=3, help="steps of each run that count; the median is shown")
    parser.add_argument("--repeat", type=int, default=1, help="runs of each row, in turns")
    parser.add_argument("--ours-only", action="store_true", help="without TRL")
    parser.add_argument(
        "--trl", choices=("plain", "best", "every"), default="best", help="how many configurations of TRL"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args()
    if not options.ours_only and not TRL_PYTHON.exists():
        raise SystemExit("TRL is not installed: run scripts/setup-trl.sh, or pass --ours-only")
    rows = ours(options.threads)
    if not options.ours_only:
        rows += trl(options.threads, which=options.trl)
    model = Path(prepare_model(options.model))
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder) / "work.json"
        note("recording the work")
        run([sys.executable, BENCH / "laptop_work.py", "--model", model, "--out", work], os.cpu_count() or 1)
        for turn in range(options.repeat):
            for row in rows:
                note(f"{turn + 1}/{options.repeat}: {row.side}, {row.configuration}, {row.threads} threads")
                measure(row, model, work, options.steps)
    machine = (
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    )
    if options.json:
        print(json.dumps({"machine": machine, "rows": [asdict(row) for row in rows]}, indent=2))
    else:
        print(f"\n{machine}\n\n{table(rows)}")
    if found := differences(rows):
        raise SystemExit("not the same work:\n" + "\n".join(found))


def note(text: str) -> None:
    print(f"-- {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
