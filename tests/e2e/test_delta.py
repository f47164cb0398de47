"""`treadle run` in bfloat16 that publishes only changed elements: few bytes are sent, every publish is proved, and the
page of the run shows what the trainer measured."""

from __future__ import annotations

import pytest
from safetensors import safe_open

from tests.e2e.runs import ending, metrics_of, run_treadle
from tests.hub_process import HubProcess
from tests.tiny_model import write_tiny_model

# tests/unit/sync/test_delta.py and tests/vllm/test_delta.py have both ends of this mode.
pytestmark = pytest.mark.full
STEPS = 3
WORDS = (
    "--steps", str(STEPS), "--env.name", "echo", "--env.task", "digits", "--env.group-size", "16",
    "--env.max-token-length", "2", "--env.num-eval", "2", "--train.batch-size", "32", "--train.lr", "1e-6",
    "--train.warmup-steps", "0", "--train.verify-publish", "always", "--train.weight-bridge-mode", "delta",
    "--train.kl-coef", "0.1",  # so that every token is forwarded, whatever the scores are
    "--engine.dtype", "bfloat16", "--engine.max-num-seqs", "32", "--plain",
)  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), num_layers=2)


@pytest.fixture(scope="module")
def run(model, tmp_path_factory):
    result, run = run_treadle(tmp_path_factory.mktemp("runs"), "--model", str(model), *WORDS)
    assert result.returncode == 0, ending(result, run)
    assert "page: http://127.0.0.1:" in result.stdout + result.stderr
    return run


def test_a_run_in_bfloat16_sends_few_elements_and_every_publish_is_proved(model, run):
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


def test_the_tokens_on_the_page_differ_by_what_the_trainer_measured(run, tmp_path):
    with (
        HubProcess(tmp_path, "--run-folder", str(run), database=run / "hub.sqlite") as hub,
        hub.client() as client,
    ):
        for step in metrics_of(run):
            groups = client.get("/dash/api/groups", params={"step": step["step"]}).json()["groups"]
            views = [client.get(f"/dash/api/groups/{group['id']}").json() for group in groups]
            assert all(view["has_record"] for view in views)
            rollouts = [rollout for view in views for rollout in view["rollouts"]]
            shown = [abs(one) for rollout in rollouts for one in rollout["differences"] if one is not None]
            assert len(shown) == sum(sum(rollout["is_trained"]) for rollout in rollouts)
            measured = step["sampling/sampling_logp_difference/mean"]
            assert sum(shown) / len(shown) == pytest.approx(measured, rel=0.02, abs=1e-4)
