"""The result of a run with adapters can be used for chat and export, and its settings start the same run again."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from transformers import AutoModelForCausalLM

from tests.e2e.processes import environment
from tests.e2e.runs import TINY_RUN, ending, metrics_of, run_treadle
from tests.tiny_model import write_tiny_model

pytestmark = pytest.mark.full  # parts of it: test_launch_replay.py, test_transformers_engine.py, test_export.py


def treadle(*words: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "treadle", *words]
    return subprocess.run(line, capture_output=True, text=True, env=environment(), timeout=300, check=False)


def test_the_adapter_of_a_run_is_its_result(tmp_path):
    model = write_tiny_model(tmp_path / "tiny")
    result, run = run_treadle(
        tmp_path / "runs", "--model", str(model), "--steps", "2", "--train.lora", *TINY_RUN, "--env.num-eval", "2"
    )
    assert result.returncode == 0, ending(result, run)
    adapter = run / "checkpoints" / "final_adapter"
    assert str(adapter) in result.stdout
    assert json.loads((run / "summary.json").read_text())["final_model"] == str(adapter)
    talk = treadle("chat", str(run), "--message", "12", "--max-tokens", "4")
    assert talk.returncode == 0, talk.stderr
    exported = treadle("export", str(run), "--merged", str(tmp_path / "whole"))
    assert exported.returncode == 0, exported.stderr
    AutoModelForCausalLM.from_pretrained(tmp_path / "whole")

    before = (run / "metrics.jsonl").read_bytes()
    config = str(run / "config.json")
    result, again = run_treadle(tmp_path / "runs", "--config", config, "--steps", "1", "--train.merge-final", "--plain")
    assert result.returncode == 0, ending(result, again)
    assert again != run
    assert [row["step"] for row in metrics_of(again)] == [1]
    assert (run / "metrics.jsonl").read_bytes() == before
    AutoModelForCausalLM.from_pretrained(again / "checkpoints" / "final_model")
