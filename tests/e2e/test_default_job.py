"""The default job itself, whole: what a new user runs first."""

from __future__ import annotations

import json

import pytest

from tests.e2e.runs import metrics_of, run_treadle
from treadle.support import fast_dtype


@pytest.mark.default_job
def test_the_default_job_teaches_the_model_to_add_and_to_end(tmp_path):
    result, run = run_treadle(tmp_path, "--plain", timeout_s=1500)
    print(result.stdout[-3000:])
    assert result.returncode == 0, result.stdout + result.stderr
    summary = json.loads((run / "summary.json").read_text())
    before, after = summary["held_out_before"], summary["held_out_after"]
    assert before["num_prompts"] == after["num_prompts"] == 256
    assert before["accuracy"] < 0.2
    assert after["accuracy"] >= 0.65  # 70 % and more on a free machine; rounding differs between processors
    assert summary["ended_after"] >= 0.9 > summary["ended_before"]
    assert len(summary["examples"]) == 3
    assert summary["peak_memory_bytes"] <= (5e9 if fast_dtype("cpu") == "bfloat16" else 6e9)
    rows = metrics_of(run)
    assert len(rows) == summary["steps"]
    assert max(row["sample/staleness_max"] for row in rows) <= 1
    # A step whose groups are all alike has no tokens to compare on.
    apart = [d for row in rows if (d := row["sampling/sampling_logp_difference/mean"]) is not None]
    assert len(apart) > 0.8 * len(rows)
    assert sum(apart) / len(apart) < 0.1
