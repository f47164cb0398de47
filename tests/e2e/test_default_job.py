"""The default job itself, whole: what a new user runs first."""

from __future__ import annotations

import json

import pytest

from tests.e2e.runs import metrics_of, run_treadle
from treadle.processor import fast_dtype


@pytest.mark.default_job
def test_the_default_job_teaches_the_model_to_add(tmp_path):
    is_fast = fast_dtype("cpu") == "bfloat16"  # else the whole job takes half an hour on two cores: its first part
    shorter = () if is_fast else ("--steps", "20")
    result, run = run_treadle(tmp_path, "--plain", *shorter, timeout_s=900 if is_fast else 2400)
    print(result.stdout[-3000:])
    assert result.returncode == 0, result.stdout + result.stderr
    summary = json.loads((run / "summary.json").read_text())
    before, after = summary["held_out_before"], summary["held_out_after"]
    assert before["num_prompts"] == after["num_prompts"] == 256
    assert before["accuracy"] < 0.2
    assert after["accuracy"] >= (0.65 if is_fast else 0.4)
    assert len(summary["examples"]) == 3
    assert summary["peak_memory_bytes"] <= (6e9 if is_fast else 7e9)
    # Six minutes on two free cores with bf16; a machine that does other work meanwhile may take longer.
    assert summary["total_s"] < 600 or not is_fast
    rows = metrics_of(run)
    assert len(rows) == summary["steps"]
    assert max(row["sample/staleness_max"] for row in rows) <= 1
    # A step whose groups are all alike has no tokens to compare on.
    apart = [d for row in rows if (d := row["sampling/sampling_logp_difference/mean"]) is not None]
    assert len(apart) > 0.8 * len(rows)
    assert sum(apart) / len(apart) < 0.1
