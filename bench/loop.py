"""Measure whole training steps on one GPU, sampling included, beside TRL, and draw where the time goes.

    python bench/loop.py OUT --model FOLDER [--steps 10] [--trl-python PYTHON] [-- --train.card-sharing turns ...]

Each side gets 16 prompts x 8 completions of 512 tokens per step. FOLDER should hold a model with random weights
(bench/bridge.py writes one of Qwen3-1.7B's shape), which never ends an answer. Words after -- are flags of
`treadle run`. Prints a table and writes OUT/timeline.png: groups in flight, and what the trainer does, over time.
"""

from __future__ import annotations

import argparse
import json
import sqlite3
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loop_work import NUM_PROMPTS, prompt

HERE = Path(__file__).resolve().parent
GROUPS, GROUP_SIZE, TOKENS = 16, 8, 512
WARM_UP = 3  # steps that do not count: compilation, and a queue that fills
# What the trainer does in a step, in this order: key of metrics.jsonl, colour.
PARTS = {
    "wait": ("rollout_wait_s", "#d9d9d9"),
    "forward, backward": ("fwd_bwd_s", "#1f6fb4"),
    "optimizer": ("optimizer_s", "#1b1b1b"),
    "publish": ("weight_sync_s", "#e08214"),
}


@dataclass(frozen=True)
class Step:
    """`ended`: seconds after the first group was started."""

    ended: float
    seconds: dict[str, float]  # by part

    @property
    def total_s(self) -> float:
        return sum(self.seconds.values())


@dataclass(frozen=True)
class Timeline:
    steps: Sequence[Step]
    groups: Sequence[tuple[float, float]]  # sampled from, until


def read_timeline(run_folder: Path) -> Timeline:
    """From the metrics of a run and the times in its hub's database."""
    rows = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
    with sqlite3.connect(f"file:{run_folder / 'hub.sqlite'}?mode=ro", uri=True) as hub:
        trained = hub.execute("SELECT at, data FROM events WHERE kind = 'trained'").fetchall()
        arrived = hub.execute("SELECT received_at, metrics FROM groups").fetchall()
    ends = {json.loads(data)["step"]: at for at, data in trained}
    groups = []
    for received_at, metrics in arrived:
        group_s = (json.loads(metrics) if metrics else {}).get("group_s", 0.0)  # unknown for waves
        groups.append((received_at - group_s, received_at))
    zero = min((start for start, _ in groups), default=min(ends.values(), default=0.0))
    steps = [
        Step(ends[row["step"]] - zero, {part: row[f"perf/{key}"] for part, (key, _) in PARTS.items()})
        for row in rows
        if row["step"] in ends
    ]
    return Timeline(steps, [(start - zero, end - zero) for start, end in groups])


def draw(timeline: Timeline, file: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    changes = sorted([(start, 1) for start, _ in timeline.groups] + [(end, -1) for _, end in timeline.groups])
    times, in_flight = [0.0], [0]
    for at, change in changes:
        times.append(at)
        in_flight.append(in_flight[-1] + change)
    above.step(times, in_flight, where="post", color="#1f6fb4")
    above.set_ylabel("groups in flight")
    for step in timeline.steps:
        left = step.ended - step.total_s
        for part, seconds in step.seconds.items():
            below.barh(0, seconds, left=left, color=PARTS[part][1], label=part if step is timeline.steps[0] else None)
            left += seconds
    below.set_yticks([0], ["trainer"])
    below.set_xlabel("seconds")
    below.legend(loc="upper left", ncols=len(PARTS), frameon=False, bbox_to_anchor=(0, -0.6))
    figure.savefig(file, dpi=120)


def run_ours(out: Path, model: Path, steps: int, flags: Sequence[str]) -> dict[str, Any]:
    started = time.perf_counter()
    command = [
        sys.executable, "-m", "treadle", "run", "--plain", "--output", str(out / "runs"), "--model", str(model),
        "--steps", str(steps), "--env.name", str(HERE / "loop_work.py"), "--env.num-eval", "0",
        "--env.group-size", str(GROUP_SIZE), "--env.max-token-length", str(TOKENS),
        "--train.batch-size", str(GROUPS * GROUP_SIZE), "--train.lr", "1e-6", "--train.checkpoint-interval", "0",
        *flags,
    ]  # fmt: skip
    subprocess.run(command, check=True)
    total_s = time.perf_counter() - started
    run_folder = max((out / "runs").iterdir(), key=lambda folder: folder.stat().st_mtime)
    timeline = read_timeline(run_folder)
    draw(timeline, out / "timeline.png")
    return {"total_s": total_s, "seconds": [step.total_s for step in timeline.steps]}


def run_trl(out: Path, model: Path, steps: int, python: str, micro_batch: int, *, sleeps: bool) -> dict[str, Any]:
    prompts = out / "prompts.json"
    prompts.write_text(json.dumps([prompt(number) for number in range(NUM_PROMPTS)]))
    command = [
        python, str(HERE / "loop_trl.py"), "--model", str(model), "--prompts", str(prompts), "--steps", str(steps),
        "--groups", str(GROUPS), "--group-size", str(GROUP_SIZE), "--tokens", str(TOKENS),
        "--micro-batch", str(micro_batch), *(["--sleep"] if sleeps else []),
    ]  # fmt: skip
    answer = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=out)
    found: dict[str, Any] = json.loads(answer.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--trl-python", help="a Python with trl and vllm; without it only ours is measured")
    own, _, flags = " ".join(sys.argv[1:]).partition(" -- ")
    options = parser.parse_args(own.split())
    options.out.mkdir(parents=True, exist_ok=True)
    sides = {"treadle": run_ours(options.out, options.model, options.steps, flags.split())}
    for micro_batch, sleeps in ((8, False), (16, False), (8, True)) if options.trl_python else ():
        name = f"TRL, {micro_batch} at once{', with sleep' if sleeps else ''}"
        sides[name] = run_trl(options.out, options.model, options.steps, options.trl_python, micro_batch, sleeps=sleeps)
    print(f"{'':24} {'s/step':>8} {'tokens/s':>9} {'total s':>8}")
    for name, found in sides.items():
        # The mean, not the median: with equal lengths two batches arrive at once, and steps are short and long in turn.
        step_s = statistics.mean(found["seconds"][WARM_UP:] or found["seconds"])
        print(f"{name:24} {step_s:8.2f} {GROUPS * GROUP_SIZE * TOKENS / step_s:9.0f} {found['total_s']:8.0f}")


if __name__ == "__main__":
    main()
