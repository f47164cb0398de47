"""Every recipe takes some steps with a tiny model: its commands, its rows, its rewards, its settings."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.processes import environment
from tests.e2e.runs import ending, metrics_of, newest_run
from tests.recipes import RECIPES, working_folder
from tests.tiny_model import write_tiny_model

STEPS = 2
BATCH = 8
FEWER = (
    "--steps", str(STEPS), "--env.group-size", "4", "--env.num-eval", "4", "--env.max-token-length", "8",
    "--env.reward-workers", "1", "--env.ensure-scores-are-not-same", "false", "--train.batch-size", str(BATCH),
    "--train.seq-len", "2048", "--engine.max-num-seqs", "16", "--engine.max-model-len", "2048", "--env.pace", "auto",
    "--plain",
)  # fmt: skip
SFT_FEWER = ("--steps", "2", "--train.batch-size", "4")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A working folder with a model that has room for every prompt, a token a character."""
    model = write_tiny_model(tmp_path / "tiny", hidden_size=32, num_layers=2)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 2048}))
    return working_folder(tmp_path)


def python(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words],
        capture_output=True,
        text=True,
        env=environment(),
        cwd=folder,
        timeout=300,
        check=False,
    )


def supervised(folder: Path, data: str) -> Path:
    """The folder of a short `treadle sft` on these rows."""
    words = ("-m", "treadle", "sft", "--data", data, "--model", "tiny", "--output", "sft", *SFT_FEWER)
    result = python(folder, *words)
    assert result.returncode == 0, result.stdout + result.stderr
    return newest_run(folder / "sft")


def train(folder: Path, recipe: str, *flags: str, model: str = "tiny") -> None:
    """Run the recipe, with fewer of everything; each step must have a whole batch and trained tokens."""
    config = f"recipes/{recipe}/recipe.toml"
    words = ("-m", "treadle", "run", "--config", config, "--model", model, "--output", "runs", *FEWER, *flags)
    result = python(folder, *words)
    run = newest_run(folder / "runs")
    assert result.returncode == 0, ending(result, run)
    steps = [row for row in metrics_of(run) if row.get("step")]
    assert [row["step"] for row in steps] == list(range(1, STEPS + 1))
    assert all(row["batch/samples_per_step"] == BATCH for row in steps)
    assert all(row["batch/trained_tokens_per_step"] > 0 for row in steps), steps


def test_reverse_text_is_learned_from_rows_and_then_from_rewards(folder):
    assert python(folder, "recipes/reverse-text/rows.py").returncode == 0
    run = supervised(folder, "data/reverse-text")
    train(folder, "reverse-text", model=str(run))


def test_every_recipe_is_run_here():
    source = Path(__file__).read_text()
    assert [name for name in RECIPES if f'train(folder, "{name}"' not in source] == []
