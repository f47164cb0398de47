"""A run whose reward is a judge on another server: its metrics, the end of its budget, and how it goes on."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import pytest

from tests.e2e.runs import ending, metrics_of, resume, run_treadle
from tests.judge_server import judging, text_of
from tests.tiny_model import write_tiny_model

STEPS = 4
FLAGS = (
    "--env.name", "echo", "--env.task", "digits", "--env.group-size", "4", "--env.max-token-length", "3",
    "--env.num-eval", "4", "--env.reward-workers", "1", "--train.batch-size", "16", "--train.checkpoint-interval", "1",
    "--engine.dtype", "float32", "--engine.max-num-seqs", "16", "--steps", str(STEPS), "--plain",
)  # fmt: skip


def points(question: str, _: int) -> str:
    return f"SCORE: {sum(map(ord, text_of(question))) % 11}"


def rewards(url: str, **settings: object) -> tuple[str, str]:
    params = {"url": url, "model": "judge", "rubric": "It is good.", **settings}
    return "--env.rewards", json.dumps([{"type": "judge", "params": params}])


@pytest.mark.full
def test_a_run_ends_with_its_judges_budget_and_goes_on_with_a_larger_one(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model", hidden_size=32, num_layers=2)
    with judging(points) as server:
        flags = ("--model", str(model), *FLAGS)
        result, run = run_treadle(tmp_path / "runs", *flags, *rewards(server.url, max_requests=20, cache="off"))
        assert result.returncode == 2, ending(result, run)
        assert "the budget of the judge 'judge' is spent: 20 requests" in result.stdout + result.stderr
        assert len(server.bodies) == 20

        result = resume(run, *rewards(server.url, cache="off"))
        assert result.returncode == 0, ending(result, run)
    [file] = run.glob("env/*/judge-*/judge.sqlite")
    with sqlite3.connect(file) as db:
        assert db.execute("SELECT * FROM spent").fetchall() == [("judge", len(server.bodies), 100 * len(server.bodies))]
    steps = [row for row in metrics_of(run) if "rollout/judge/requests" in row]
    assert {row["step"] for row in steps} >= set(range(2, STEPS + 1))
    assert all(row["rollout/judge/tokens"] == 100 * row["rollout/judge/requests"] for row in steps)
    assert all(row["rollout/judge/failures"] == 0 for row in steps)
