"""`treadle run` in bfloat16 with the elements that changed sent alone: proved at every step, and far fewer bytes."""

from __future__ import annotations

from safetensors import safe_open

from tests.e2e.runs import metrics_of, run_treadle
from tests.tiny_model import write_tiny_model

STEPS = 4
WORDS = (
    "--steps", str(STEPS), "--env.name", "echo", "--env.task", "digits", "--env.group-size", "16",
    "--env.max-token-length", "2", "--env.num-eval", "2", "--train.batch-size", "96", "--train.lr", "1e-6",
    "--train.warmup-steps", "0", "--train.canary-share", "1", "--train.weight-bridge-mode", "delta",
    "--engine.dtype", "bfloat16", "--engine.max-num-seqs", "96", "--plain",
)  # fmt: skip


def test_a_run_in_bfloat16_sends_few_elements_of_many_weights_and_every_publish_is_proved(tmp_path, tmp_path_factory):
    model = write_tiny_model(tmp_path_factory.mktemp("tiny"), num_layers=2)
    result, run = run_treadle(tmp_path, "--model", str(model), *WORDS)
    assert result.returncode == 0, result.stdout + result.stderr
    rows = metrics_of(run)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert sum((row["grad_norm"] or 0) > 0 for row in rows) > 1  # weights moved
    live = run / "checkpoints" / "live"
    assert sorted(folder.name for folder in live.iterdir()) == [f"weights_v{version}" for version in (STEPS - 1, STEPS)]
    whole = (model / "model.safetensors").stat().st_size / 2  # it is saved in float32
    assert all(0 < row["sync/bytes"] < 0.25 * whole for row in rows)
    with safe_open(live / f"weights_v{STEPS}" / "model.safetensors", framework="pt") as file:
        assert file.metadata()["treadle_delta_from"] == str(STEPS - 1)
        assert any(name.endswith("#indices") for name in file.keys())  # noqa: SIM118
    assert all(row["sync/canary_mean_abs_diff"] < 0.25 for row in rows)
