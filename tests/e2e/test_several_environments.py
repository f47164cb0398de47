"""A run with two environments on a tiny model: the shares of its batches, its evaluations, and its resume."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import pytest

from tests.e2e.runs import ending, metrics_of, resume, run_treadle
from tests.tiny_model import write_tiny_model

SETTINGS = """
steps = 4

[[env]]
name = "echo"
task = "digits"
weight = 0.75
group_size = 4

[[env]]
name = "arithmetic"
weight = 0.25
group_size = 2

[train]
batch_size = 16

[engine]
dtype = "float32"
max_num_seqs = 32
"""
# Side by side with training, where one environment alone could fill a batch.
FLAGS = ("--env.max-age", "1", "--env.max-token-length", "4", "--env.num-eval", "6", "--env.reward-workers", "1")


def sequences_by_step(run: Path) -> dict[int, dict[str, int]]:
    """What each environment brought to the batch of each step."""
    with sqlite3.connect(run / "hub.sqlite") as db:
        names = dict(db.execute("SELECT env_id, desired_name FROM envs"))
        groups = {row[0]: row[1:] for row in db.execute("SELECT id, env_id, size FROM groups")}
        batches = list(db.execute("SELECT step, group_ids FROM batches WHERE state = 'trained'"))
    found: dict[int, dict[str, int]] = {}
    for step, ids in batches:
        shares = found.setdefault(step, {})
        for env_id, size in (groups[group] for group in json.loads(ids)):
            shares[names[env_id]] = shares.get(names[env_id], 0) + size
    return found


@pytest.mark.full
def test_every_batch_has_the_share_of_each_environment(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model", hidden_size=32, num_layers=2)
    (tmp_path / "mix.toml").write_text(SETTINGS)
    result, run = run_treadle(
        tmp_path / "runs", "--config", str(tmp_path / "mix.toml"), "--model", str(model), *FLAGS, "--plain"
    )
    assert result.returncode == 0, ending(result, run)
    shares = {"echo": 12, "arithmetic": 4}
    assert sequences_by_step(run) == dict.fromkeys(range(1, 5), shares)
    summary = json.loads((run / "summary.json").read_text())
    measured = {
        env: [found[when]["step"] for when in ("before", "after")] for env, found in summary["held_out_by_env"].items()
    }
    assert measured == {"echo": [0, 4], "arithmetic": [0, 4]}
    for env in measured:
        first = json.loads((run / "evals" / env / "eval_step_000000.json").read_text())
        assert first["policy_version"] == 0, "measured before the first step"
        assert f"held-out accuracy of {env} at step 4" in result.stdout
    more = resume(run, "--steps", "6")
    assert more.returncode == 0, ending(more, run)
    assert [step["step"] for step in metrics_of(run)] == [1, 2, 3, 4, 5, 6]
    assert sequences_by_step(run) == dict.fromkeys(range(1, 7), shares)


@pytest.mark.full
def test_processes_of_one_environment_share_its_items(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model", hidden_size=32, num_layers=2)
    flags = ("--env.processes", "3", "--env.name", "echo", "--env.group-size", "4", "--train.batch-size", "24")
    result, run = run_treadle(
        tmp_path / "runs", "--model", str(model), *flags, *FLAGS, "--engine.dtype", "float32", "--steps", "4", "--plain"
    )
    assert result.returncode == 0, ending(result, run)
    with sqlite3.connect(run / "hub.sqlite") as db:
        names = dict(db.execute("SELECT env_id, desired_name FROM envs"))
        items = list(db.execute("SELECT env_id, item FROM groups"))
    assert len({item for _, item in items}) == len(items) >= 24, "no item was sampled twice"
    for env_id, item in items:
        assert item % 3 == {"echo": 0, "echo-2": 1, "echo-3": 2}[names[env_id]]
    shares = {"echo": 8, "echo-2": 8, "echo-3": 8}
    assert sequences_by_step(run) == dict.fromkeys(range(1, 5), shares)
    assert [path.name for path in (run / "evals").iterdir()] == ["echo"], "one process evaluates for all"
