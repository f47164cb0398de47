"""Every weight sync mode with `treadle run`: it trains, is verified, and ends at the last version."""

from __future__ import annotations

import json

import pytest

from tests.e2e.runs import ending, metrics_of, run_treadle
from tests.tiny_model import write_tiny_model

STEPS = 7
SMALL = (
    "--steps", str(STEPS), "--env.name", "echo", "--env.task", "digits", "--env.group-size", "16",
    "--env.max-token-length", "2", "--env.num-eval", "2", "--train.batch-size", "96", "--train.lr", "2e-3",
    "--train.verify-publish", "always", "--engine.dtype", "float32", "--engine.max-num-seqs", "96", "--plain",
)  # fmt: skip
ADAPTERS = ("--train.lora-target-modules", "q_proj", "v_proj", "up_proj", "down_proj")
MODES = {
    "one copy": ("--train.single-copy",),
    "two copies": ("--train.use-shared-memory",),
    "two copies, gloo": ("--train.use-shared-memory", "--train.broadcast-by", "gloo"),
    "lora_only": ("--train.weight-bridge-mode", "lora_only", *ADAPTERS),
    "lora_only, shared base": ("--train.weight-bridge-mode", "lora_only", "--train.single-copy", *ADAPTERS),
    "lora_only, nf4": ("--train.weight-bridge-mode", "lora_only", "--train.quantization", "nf4", *ADAPTERS),
    "lora_restart": ("--train.weight-bridge-mode", "lora_restart", *ADAPTERS),
    "none": ("--train.weight-bridge-mode", "none"),
    "reload": ("--train.weight-bridge-mode", "reload", "--train.vllm-restart-interval", "2"),
    "delta": ("--train.weight-bridge-mode", "delta", "--train.train-layer-indices", "1-2"),
}
# Other tests show the rest: "one copy" is the default, which most runs of this folder use;
# tests/unit/sync/test_modes.py has the trainer's end of each mode, tests/contract/test_engine_api.py the
# engine's: broadcasts, reloads, and restarts with a saved model or adapter.
COMMON = ("lora_only",)
PUBLISHED = {"lora_restart": [3, 6, 7], "none": [3, 6, 7], "reload": [2, 4, 6, 7]}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.mark.parametrize(
    "mode", [mode if mode in COMMON else pytest.param(mode, marks=pytest.mark.full) for mode in MODES]
)
def test_a_run_publishes_proved_weights_and_ends_at_the_last_version(model, tmp_path, mode):
    result, run = run_treadle(tmp_path, "--model", str(model), *SMALL, *MODES[mode])
    assert result.returncode == 0, ending(result, run)
    check_run(run, mode)
    is_one_copy = "weights_compared" in (run / "logs" / "trainer.log").read_text()  # only of weights that are shared
    assert is_one_copy == (mode in ("one copy", "lora_only, shared base"))


def check_run(run, mode):
    rows = metrics_of(run)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert all(row["skipped_steps"] == 0 for row in rows)
    assert sum(row["grad_norm"] is not None for row in rows) > 2  # something was learned from, so weights moved
    # Trainer and engine agree, on the canary and on every rollout that is not older than the policy.
    canaries = [row["sync/canary_max_abs_diff"] for row in rows if "sync/canary_max_abs_diff" in row]
    assert canaries
    assert max(canaries) < 1e-3
    differences = [row["sampling/sampling_logp_difference/max"] for row in rows if row["grad_norm"] is not None]
    assert differences[0] < 1e-3
    sent = [row["step"] for row in rows if row["sync/bytes"] > 0]
    assert sent == ([] if mode == "one copy" else PUBLISHED.get(mode, list(range(1, STEPS + 1))))
    # The last evaluation was answered by the last version.
    last = json.loads((run / "evals" / f"eval_step_{STEPS:06d}.json").read_text())
    assert last["policy_version"] == STEPS
    kept = sorted((run / "checkpoints" / "live").glob("*")) if (run / "checkpoints" / "live").exists() else []
    assert len(kept) == (0 if "cop" in mode else 2)


def test_an_old_command_line_with_both_bridges_is_refused(model, tmp_path):
    result, _ = run_treadle(tmp_path, "--model", str(model), *SMALL, "--train.single-copy", "--train.use-shared-memory")
    assert result.returncode == 2
    assert "give one of the two" in result.stderr
