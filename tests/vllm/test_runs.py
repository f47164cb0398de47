"""`treadle run` with vLLM as the engine: logprobs of trainer and engine must agree.

./check has one run with a tiny model. ./check --full has a short default job, with its model, task and dtype, in every
weight sync mode that needs no GPU.
"""

from __future__ import annotations

import json

import pytest
import torch

from tests.e2e.runs import ending, metrics_of, run_treadle
from tests.e2e.test_sync_modes import MODES, SMALL
from tests.e2e.test_sync_modes import check_run as check_tiny_run
from tests.vllm.conftest import HAS_GPU
from treadle.support import fast_dtype
from treadle.sync.canary import MEAN_BOUNDS

STEPS = 2
SHORT = (
    "--steps", str(STEPS), "--env.group-size", "4", "--env.max-token-length", "16", "--env.num-eval", "4",
    # At temperature 1 correct answers are rare, and whole batches have no signal.
    "--env.temperature", "0.5",
    # Two steps that change the model, with on-policy rollouts only: trainer and engine differ by rounding, unless a
    # publish did not arrive.
    "--train.lr", "1e-4", "--train.warmup-steps", "0", "--env.max-age", "0",
    "--train.verify-publish", "always", "--train.vllm-restart-interval", "1", "--plain",
)  # fmt: skip
# vLLM warms up with the longest prompt batch that it accepts: a quarter of its start with the default model.
SHORT_PROMPTS = ("--engine.max-model-len", "256", "--engine.vllm-args=--max-num-batched-tokens 256")
# --engine.threads also stops vLLM from binding its threads to a core that another test uses.
ONE_THREAD = ("--engine.threads", "1", "--train.threads", "1")
RUN_S = 900.0  # three starts of vLLM on a busy machine

DTYPE = getattr(torch, fast_dtype("cpu"))
WEIGHT_BYTES = DTYPE.itemsize * 134_515_008  # the default model
# Bytes of a publish, as a fraction of that (min, max): an adapter of rank 16 in float32 on four of seven matrices of a
# layer; with `delta`, the changed elements of the two layers that are trained here.
ADAPTER = (11e6 / WEIGHT_BYTES, 13e6 / WEIGHT_BYTES)
SHARE_SENT = {
    "one copy": (0, 0), "two copies": (1, 1), "two copies, gloo": (1, 1), "none": (1, 1.02), "reload": (1, 1.02),
    "lora_only": ADAPTER, "lora_only, shared base": ADAPTER, "lora_restart": ADAPTER, "delta": (0.01, 0.06),
}  # fmt: skip
# Mean difference in nats per sampled token. Measured in bfloat16: 0.02 to 0.05. An engine two steps behind: 0.8.
MAX_DIFFERENCE = 0.08

# The trainer does not wait for these: rollouts may be of the previous version, which the next publish verifies.
RESTARTS = ("none", "lora_restart")


@pytest.mark.skipif(HAS_GPU, reason="its bounds are for float32 on a CPU; tests/gpu/test_one_gpu.py has runs on a GPU")
def test_a_tiny_run_agrees_with_the_engine_on_logprobs(tmp_path, tiny_model):
    """Adapters are in test_policy.py, changed elements in test_delta.py."""
    mode = "one copy"
    words = ("--model", str(tiny_model), *SMALL, *SHORT_PROMPTS, *MODES[mode], *ONE_THREAD)
    result, run = run_treadle(tmp_path, *words, timeout_s=RUN_S)
    assert result.returncode == 0, ending(result, run)
    assert "loaded engine=vllm" in (run / "logs" / "engine.log").read_text()
    check_tiny_run(run, mode)


@pytest.mark.full
@pytest.mark.skipif(HAS_GPU, reason="as above")
def test_a_tiny_run_with_two_workers_agrees_on_logprobs(tmp_path, tiny_model):
    """The broadcast goes to both workers of a tensor-parallel vLLM."""
    mode = "two copies"
    split = ("--engine.tensor-parallel-size", "2")
    words = ("--model", str(tiny_model), *SMALL, *SHORT_PROMPTS, *MODES[mode], *split, *ONE_THREAD)
    result, run = run_treadle(tmp_path, *words, timeout_s=RUN_S)
    assert result.returncode == 0, ending(result, run)
    assert "by=gloo" in (run / "logs" / "trainer.log").read_text()
    check_tiny_run(run, mode)


@pytest.mark.full
@pytest.mark.parametrize("mode", MODES)
def test_the_default_job_agrees_with_the_engine_on_logprobs(tmp_path, mode):
    result, run = run_treadle(tmp_path, *MODES[mode], *SHORT, *SHORT_PROMPTS, timeout_s=RUN_S)
    assert result.returncode == 0, ending(result, run)
    assert "loaded engine=vllm" in (run / "logs" / "engine.log").read_text()
    check_run(run, mode)


def check_run(run, mode):
    rows = metrics_of(run)
    steps = [row["step"] for row in rows]
    assert steps == list(range(1, STEPS + 1))
    assert all(row["skipped_steps"] == 0 for row in rows)
    on_policy = [row for row in rows if row["sample/staleness_max"] == 0]
    assert on_policy == (rows[: len(on_policy)] if mode in RESTARTS else rows)
    differences = [row["sampling/sampling_logp_difference/mean"] for row in on_policy if row["grad_norm"] is not None]
    assert differences
    assert max(differences) < MAX_DIFFERENCE
    canaries = {row["step"]: row["sync/canary_mean_abs_diff"] for row in rows if "sync/canary_mean_abs_diff" in row}
    assert list(canaries) == (steps[1:] if mode in RESTARTS else steps)
    assert max(canaries.values()) < MEAN_BOUNDS[DTYPE]
    least, most = SHARE_SENT[mode]
    assert all(least <= row["sync/bytes"] / WEIGHT_BYTES <= most for row in rows)
    last = json.loads((run / "evals" / f"eval_step_{STEPS:06d}.json").read_text())
    assert last["policy_version"] == STEPS
