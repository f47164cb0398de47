"""Reproduce the figures of docs/weights.md for one GPU: real runs with vLLM and one copy of the weights, then adapter
swaps under load.

    python bench/one_gpu.py OUT [--gsm8k FOLDER]      FOLDER: train.jsonl and test.jsonl of GSM8K, for a run on it

Prints for each run its mean reward in ten parts of the run, accuracy on held-out prompts before and after, and the cost
of publishes; then the line of bench/bridge.py for adapters. Runs and the servers' logs stay in OUT.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
# For a card with 80 GB or more: each vLLM gets a fixed share, independent of the free memory at its start.
ENGINE = [
    "--engine.engine", "vllm", "--engine.gpu-memory-utilization", "0.15",
    "--engine.vllm-args=--kv-cache-memory-bytes=8G", "--engine.max-num-seqs", "256",
]  # fmt: skip
PARTS = 10


def begin(name: str, argv: list[str], out: Path) -> subprocess.Popen[bytes]:
    with (out / f"{name}.log").open("w") as log:
        return subprocess.Popen([sys.executable, *argv], stdout=log, stderr=subprocess.STDOUT)


def run_flags(name: str, out: Path, *more: str) -> list[str]:
    return ["-m", "treadle", "run", "--plain", "--output", str(out / name), *ENGINE, *more]


def curve(values: list[float]) -> str:
    """Means over ten equal parts of the run.

    >>> curve([0.0, 1.0] * 10)
    '0.50 0.50 0.50 0.50 0.50 0.50 0.50 0.50 0.50 0.50'
    """
    edges = [len(values) * i // PARTS for i in range(PARTS + 1)]
    return " ".join(f"{statistics.mean(values[a:b]):.2f}" for a, b in itertools.pairwise(edges) if b > a)


def tell(name: str, out: Path) -> None:
    for folder in sorted((out / name).glob("*/summary.json")):
        summary: dict[str, Any] = json.loads(folder.read_text())
        rows = [json.loads(line) for line in (folder.parent / "metrics.jsonl").read_text().splitlines()]

        def middle(key: str, rows: list[dict[str, Any]] = rows) -> float:
            found = [row[key] for row in rows if row.get(key) is not None]
            return statistics.median(found) if found else float("nan")

        print(f"{name}: {len(rows)} steps in {summary['total_s']:.0f} s")
        print(f"  reward    {curve([row['reward'] for row in rows])}")
        print(f"  held out  {json.dumps(summary['held_out_before'])}")
        print(f"         -> {json.dumps(summary['held_out_after'])}")
        for key in ("perf/weight_sync_s", "perf/weight_sync_hold_s", "sampling/sampling_logp_difference/mean"):
            print(f"  {key} median {middle(key):.5f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--gsm8k", type=Path)
    parser.add_argument("--steps", type=int, default=25, help="of the default job")
    parser.add_argument("--gsm8k-steps", type=int, default=80)
    known = parser.parse_args()
    out: Path = known.out
    out.mkdir(parents=True, exist_ok=True)
    started = {"default": begin("default", run_flags("default", out, "--steps", str(known.steps)), out)}
    if known.gsm8k is not None:
        flags = [
            "--env.name", str(HERE.parent / "examples" / "gsm8k_small.py"), "--env.data", str(known.gsm8k),
            "--steps", str(known.gsm8k_steps), "--train.batch-size", "128", "--train.lr", "1e-5",
            "--env.num-eval", "512", "--env.steps-per-eval", "0", "--hub.port", "8100", "--engine.port", "9101",
        ]  # fmt: skip
        started["gsm8k"] = begin("gsm8k", run_flags("gsm8k", out, *flags), out)
    codes = {name: process.wait() for name, process in started.items()}
    for name in codes:
        tell(name, out)
    # Runs alone on the card, because the duration of a swap is measured.
    adapters = ["--engine", "vllm", "--mode", "lora_only", "--steps", "50", "--turns", "1"]
    bench = begin("bridge", [str(HERE / "bridge.py"), *adapters, "--logs", str(out / "adapters")], out)
    codes["adapters"] = bench.wait()
    print((out / "bridge.log").read_text()[-3000:])
    print(f"ended with {codes}")


if __name__ == "__main__":
    main()
