"""A whole run that learns from a teacher alone: no reward, every process real."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.e2e.processes import free_port, running, wait_until_healthy
from tests.e2e.runs import TINY_RUN, ending, metrics_of, run_treadle
from tests.tiny_model import write_tiny_model

STEPS = 16


@pytest.mark.full  # tests/golden and tests/unit/train/test_teacher.py check each part of it
def test_a_run_moves_to_its_teacher_without_any_reward(tmp_path):
    student = write_tiny_model(tmp_path / "student", hidden_size=64, num_layers=1)
    teacher = write_tiny_model(tmp_path / "teacher", seed=7, hidden_size=64, num_layers=1)
    model = AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float32)
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(3.0)  # it prefers some tokens clearly
    model.save_pretrained(teacher)
    port, log = free_port(), tmp_path / "teacher.log"
    url = f"http://127.0.0.1:{port}"
    serving = ("--model", str(teacher), "--port", str(port), "--dtype", "float32", "--threads", "1")
    with running("engine", *serving, "--engine", "transformers", "--max-model-len", "2304", log=log) as process:
        wait_until_healthy(f"{url}/health", process, log)
        flags = ("--train.teacher-url", url, "--train.reward-coef", "0", "--train.lr", "1e-2", "--steps", str(STEPS))
        result, run = run_treadle(tmp_path / "runs", "--model", str(student), *TINY_RUN, *flags)
    assert result.returncode == 0, ending(result, run)
    rows = metrics_of(run)
    distances = [row["distill/reverse_kl"] for row in rows]
    assert sum(distances[-4:]) < 0.7 * sum(distances[:4]), distances
    assert all(row["distill/taught_frac"] == 1 for row in rows)
    assert all(row["distill/teacher_tokens"] > 160 for row in rows)
    assert "no group had different scores" not in result.stdout
