"""`treadle sft` as a user runs it: from rows or a run to a model that `treadle run` trains further."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.processes import environment
from tests.e2e.runs import TINY_RUN, ending, metrics_of, newest_run, run_treadle
from tests.tiny_model import write_tiny_model


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "treadle", *words]


def treadle(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*words), capture_output=True, text=True, env=environment(), timeout=300, check=False)


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    file = tmp_path / "rows.jsonl"
    sums = [(a, b) for a in range(10) for b in range(10)]
    file.write_text("".join(json.dumps({"prompt": f"{a}+{b}=", "completion": str(a + b)}) + "\n" for a, b in sums))
    return file


def test_a_stopped_sft_is_resumed_and_its_result_has_a_lower_loss(tmp_path, rows):
    model = write_tiny_model(tmp_path / "tiny")
    flags = ("--data", str(rows), "--model", str(model), "--output", str(tmp_path / "runs"), "--train.lr", "1e-3")
    for epochs in (12, 60):  # on a busy machine, short epochs may be over before the signal is sent
        words = command("sft", *flags, "--epochs", str(epochs))
        process = subprocess.Popen(
            words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment(), cwd=tmp_path
        )
        assert process.stdout is not None
        printed = []
        for line in process.stdout:
            printed.append(line)
            if re.match(r"step +3/", line):
                process.send_signal(signal.SIGINT)
        if process.wait(60) != 0:
            break
    run = newest_run(tmp_path / "runs")
    assert process.wait(60) == 130, "".join(printed)
    assert f"sft --resume runs/{run.name}" in printed[-1]
    saved = json.loads((run / "summary.json").read_text())
    assert not saved["is_complete"]

    again = treadle("sft", "--resume", str(run))
    assert again.returncode == 0, again.stdout + again.stderr
    steps = metrics_of(run)
    assert [row["step"] for row in steps] == list(range(6 * epochs + 1))  # 95 rows, 16 a step
    assert steps[-1]["eval_loss"] < steps[0]["eval_loss"] / 2
    assert f"run --model {run}" in again.stdout
    assert (run / "checkpoints" / "final_model" / "model.safetensors").is_file()
    complete = treadle("sft", "--resume", str(run))
    assert "this run is complete" in complete.stdout


@pytest.mark.full  # its parts: tests/unit/sft and test_lora_result.py
def test_the_best_completions_of_a_run_warm_up_the_next_one(tmp_path):
    model = write_tiny_model(tmp_path / "tiny")
    few = ("--steps", "2", "--env.num-eval", "0")
    result, run = run_treadle(tmp_path / "first", "--model", str(model), *TINY_RUN, *few)
    assert result.returncode == 0, ending(result, run)

    warmed = treadle(
        "sft", "--from", str(run), "--min-score", "0", "--output", str(tmp_path / "sft"), "--steps", "4",
        "--train.lora", "--train.ranks", "2",
    )  # fmt: skip
    assert warmed.returncode == 0, warmed.stdout + warmed.stderr
    sft = newest_run(tmp_path / "sft")
    assert json.loads((sft / "config.json").read_text())["model"] == str(model)
    assert (sft / "checkpoints" / "final_adapter").is_dir()

    result, again = run_treadle(tmp_path / "second", "--model", str(sft), *TINY_RUN, *few)
    assert result.returncode == 0, ending(result, again)
    trained = json.loads((again / "config.json").read_text())["model"]
    assert Path(trained) == sft / "checkpoints" / "final_model"


def test_settings_of_rollouts_are_refused_with_their_remedies(tmp_path, rows):
    refused = treadle("sft", "--data", str(rows), "--train.kl-coef", "0.1", "--train.epochs", "2", "--model", "./none")
    assert refused.returncode == 2
    for line in (
        "--train.kl-coef is a setting of treadle run",
        "-> leave --train.kl-coef out",
        "-> --epochs sets the passes over the rows",
    ):
        assert line in refused.stderr
