"""Write the folder of a run that learned, with evaluations before and after."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from treadle.config import RunConfig, load_run, save_run
from treadle.report.history import History, reader_of
from treadle.report.summary import Outcome, save_summary, summarize
from treadle.track.files import HEALTH_FILE, HealthFile


def step_values(step: int, num_steps: int = 50) -> dict[str, Any]:
    accuracy = step / num_steps * 0.8
    return {
        "step": step,
        "time_s": 6.0 * step,
        "reward": accuracy + 0.05,
        "rollout/accuracy": accuracy,
        "rollout/generation_s": 3.0,
        "completions/clipped_ratio": 0.03,
        "sample/staleness_mean": 1.0,
        "perf/step_s": 5.0,
        "perf/rollout_wait_s": 0.5,
        "perf/fwd_bwd_s": 3.0,
        "perf/optimizer_s": 1.0,
        "perf/trained_tok_s_wall_clock": 412.4,
        "perf/generated_tok_s_wall_clock": 812.3,
        "policy_loss": None,
    }


def evaluation(step: int, right: dict[str, bool], accuracy: float) -> dict[str, Any]:
    return {
        "env": "arithmetic",
        "task": "addition",
        "step": step,
        "policy_version": step,
        "num_prompts": 256,
        "num_right": round(256 * accuracy),
        "accuracy": accuracy,
        "interval_95": [accuracy - 0.01, accuracy + 0.02],
        "mean_score": accuracy / 2,
        "seconds": 9.0,
        "samples": [
            {
                "prompt": prompt,
                "completion": f"answer {step}\n to {prompt}",
                "gold": "7",
                "is_right": is_right,
            }
            for prompt, is_right in right.items()
        ],
    }


def write_run(folder: Path, *, num_steps: int = 50, is_evaluated: bool = True) -> RunConfig:
    (folder / "evals").mkdir(parents=True)
    lines = [json.dumps(step_values(step)) for step in range(1, num_steps + 1)]
    (folder / "metrics.jsonl").write_text("".join(line + "\n" for line in lines))
    before = {"a": False, "b": True, "c": False, "d": False, "e": False}
    after = {"a": False, "b": True, "c": True, "d": True, "e": False}
    (folder / "evals" / "step-0.json").write_text(json.dumps(evaluation(0, before, 0.016)))
    if is_evaluated:
        (folder / "evals" / "step-50.json").write_text(json.dumps(evaluation(num_steps, after, 0.73)))
    return load_run(
        None,
        {
            "steps": 50,
            "train.metrics_file": folder / "metrics.jsonl",
            "env.data_dir_to_save_evals": folder / "evals",
        },
    )


def write_finished(
    folder: Path, right: str, *, seed: int = 1, reward: float = 0.8, num_steps: int = 4, **settings: Any
) -> Path:
    """A run with a summary: of the held-out prompts "a" to "h" it had "a" right before training and `right` after it.

    `reward` is that of the first step; step n has n times that.
    """
    (folder / "evals").mkdir(parents=True)
    lines = [json.dumps(step_values(step, num_steps) | {"reward": reward * step}) for step in range(1, num_steps + 1)]
    (folder / "metrics.jsonl").write_text("".join(line + "\n" for line in lines))
    for step, found in ((0, "a"), (num_steps, right)):
        values = evaluation(step, {prompt: prompt in found for prompt in "abcdefgh"}, len(found) / 8)
        (folder / "evals" / f"step-{step}.json").write_text(json.dumps(values))
    own = {"train.metrics_file": folder / "metrics.jsonl", "hub.port": 8000 + seed}
    config = load_run(None, {"steps": num_steps, "seed": seed, **own, **settings})
    save_run(config, folder / "config.json", derived={"train.metrics_file"})
    (folder / "request.json").write_text("{}")
    outcome = Outcome(True, 60.0 * seed, 5_000_000_000, {"trainer": 5_000_000_000})
    save_summary(summarize(config, folder, history_of(config, folder), outcome), folder)
    return folder


def history_of(config: RunConfig, folder: Path) -> History:
    return reader_of(config, folder).read()


def write_health(folder: Path, *messages: tuple[int, str]) -> None:
    """The health events of a trainer."""
    file = HealthFile(folder / HEALTH_FILE)
    for step, message in messages:
        file.write(step, message)
