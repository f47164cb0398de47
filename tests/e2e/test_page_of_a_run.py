"""The page of a real run: what the trainer found in the tokens is what the page shows of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.runs import TINY_RUN, metrics_of, run_treadle
from tests.hub_process import HubProcess
from tests.tiny_model import write_tiny_model


def test_the_tokens_on_the_page_differ_by_what_the_trainer_measured(tmp_path: Path):
    model = write_tiny_model(tmp_path / "tiny")
    # With a KL term every token is forwarded, whatever the scores are.
    flags = ("--model", str(model), "--steps", "3", "--train.kl-coef", "0.1", *TINY_RUN)
    result, run = run_treadle(tmp_path / "runs", *flags)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "page: http://127.0.0.1:" in result.stdout + result.stderr
    with (
        HubProcess(tmp_path, "--run-folder", str(run), database=run / "hub.sqlite") as hub,
        hub.client() as client,
    ):
        for step in metrics_of(run):
            groups = client.get("/dash/api/groups", params={"step": step["step"]}).json()["groups"]
            views = [client.get(f"/dash/api/groups/{group['id']}").json() for group in groups]
            assert all(view["has_record"] for view in views)
            rollouts = [rollout for view in views for rollout in view["rollouts"]]
            told = [abs(one) for rollout in rollouts for one in rollout["differences"] if one is not None]
            assert len(told) == sum(sum(rollout["is_trained"]) for rollout in rollouts)
            measured = step["sampling/sampling_logp_difference/mean"]
            if measured is None:  # nothing was trained in this step
                assert not told
            else:
                assert sum(told) / len(told) == pytest.approx(measured, rel=0.02, abs=1e-4)
