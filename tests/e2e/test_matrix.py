"""`treadle matrix` with a tiny model: one mode that fails does not end the others, and what was interrupted goes on."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.processes import environment, last_lines
from tests.e2e.runs import metrics_of, newest_run
from tests.tiny_model import write_tiny_model
from treadle.support import MATRIX_MODES as MODES

pytestmark = pytest.mark.full  # ./check runs single modes, and the rows in tests/unit/launch/test_launch_matrix.py

SMALL = (
    "--env.name", "echo", "--env.task", "digits", "--env.group-size", "8", "--env.max-token-length", "2",
    "--env.num-eval", "2", "--train.batch-size", "32", "--train.lr", "2e-3", "--engine.dtype", "float32",
    "--engine.max-num-seqs", "32", "--plain",
)  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


def words(*flags: str) -> list[str]:
    return [sys.executable, "-m", "treadle", "matrix", *flags]


def run_matrix(*flags: str, timeout_s: float = 900) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        words(*flags), capture_output=True, text=True, env=environment(), timeout=timeout_s, check=False
    )


def results(matrix: Path) -> dict[str, Any]:
    return {row["mode"]: row for row in json.loads((matrix / "matrix.json").read_text())["rows"]}


def test_a_mode_that_fails_is_a_row_and_the_others_run(model: Path, tmp_path: Path) -> None:
    """An adapter of layers that the model does not have."""
    modes = ("--modes", "lora_only,single_copy,broadcast_nccl")
    broken = ("--train.lora-target-modules", "no_such_layer")
    done = run_matrix("--model-name", str(model), "--steps", "2", "--output", str(tmp_path), *modes, *broken, *SMALL)
    matrix = newest_run(tmp_path)
    assert done.returncode == 1, last_lines(done.stdout + done.stderr)
    rows = results(matrix)
    assert {mode: row["result"] for mode, row in rows.items()} == {
        "lora_only": "failed", "single_copy": "passed", "broadcast_nccl": "not possible",
    }  # fmt: skip
    assert "no_such_layer" in rows["lora_only"]["reason"]
    figures = rows["single_copy"]["figures"]
    unknown = {key for key, value in figures.items() if value is None}
    assert unknown <= {"device_gb", "sampled"}, "no GPU; and perhaps no step had anything to train on"
    assert len(metrics_of(matrix / rows["single_copy"]["run"])) == 2
    assert "single_copy: passed: 2 of 2 steps were taken" in done.stdout
    assert {"matrix.txt", "matrix.png", "matrix.html"} <= {path.name for path in matrix.iterdir()}


def test_all_modes_pass_also_when_interrupted(model: Path, tmp_path: Path) -> None:
    flags = words("--model-name", str(model), "--steps", "6", "--output", str(tmp_path), *SMALL)
    process = subprocess.Popen(flags, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment())
    second = "broadcast"
    deadline = time.monotonic() + 300
    while not list(tmp_path.glob(f"*/{second}/*/metrics.jsonl")):
        assert process.poll() is None, last_lines(process.stdout.read() if process.stdout else "")
        assert time.monotonic() < deadline
        time.sleep(0.05)
    interrupted = time.time()
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 130, last_lines(output)
    matrix = newest_run(tmp_path)
    before = {mode: row["result"] for mode, row in results(matrix).items()}
    assert before.pop("broadcast_nccl") == "not possible"
    assert list(before.values()) == ["passed", "stopped", *["not run"] * (len(MODES) - 3)]
    assert f"matrix --resume {matrix}" in output
    done = run_matrix("--resume", str(matrix), "--plain")
    assert done.returncode == 0, last_lines(done.stdout + done.stderr)
    rows = results(matrix)
    assert {mode for mode, row in rows.items() if row["result"] == "passed"} == set(MODES) - {"broadcast_nccl"}
    assert len({row["figures"]["first_reward"] for row in rows.values() if row["figures"]}) == 1, "one task, one seed"
    assert len(list((matrix / second).iterdir())) == 1, "the interrupted run went on"
    first = matrix / rows["single_copy"]["run"] / "metrics.jsonl"
    assert first.stat().st_mtime < interrupted, "what had finished did not run again"
