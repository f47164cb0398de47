"""The whole system on a model of a million random parameters: every process, one small task, learned from zero."""

from __future__ import annotations

import json
import time

import pytest

from tests.e2e.runs import TINY_RUN, ending, metrics_of, resume, run_treadle
from tests.tiny_model import write_tiny_model
from treadle.net.access_tokens import CLIENT_ROLES, role_token

STEPS = 60


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


def test_a_random_model_learns_to_echo_and_a_finished_run_can_go_on(model, tmp_path):
    started = time.monotonic()
    files = [tmp_path / "hub.token", tmp_path / "engine.token"]  # not there yet: the run makes them
    tokens = ("--hub.token-file", str(files[0]), "--engine.token-file", str(files[1]))
    output = tmp_path / "runs"
    result, run = run_treadle(output, "--model", str(model), "--steps", str(STEPS), *TINY_RUN, *tokens, cores=1)
    seconds = time.monotonic() - started
    assert result.returncode == 0, ending(result, run)
    rewards = [row["reward"] for row in metrics_of(run)]
    first, last = sum(rewards[:5]) / 5, sum(rewards[-5:]) / 5
    summary = json.loads((run / "summary.json").read_text())
    before, after = summary["held_out_before"]["accuracy"], summary["held_out_after"]["accuracy"]
    print(f"reward {first:.2f} -> {last:.2f}, held-out {before:.2f} -> {after:.2f} in {seconds:.0f} s")
    assert first < 0.35
    assert last > 0.7
    assert after > before + 0.3
    assert seconds < 300  # 25 on an idle core
    assert (run / "reward.png").stat().st_size > 10_000
    assert (run / "checkpoints" / "final_model" / "model.safetensors").is_file()
    assert f"chat {run}" in result.stdout
    more = resume(run, "--steps", str(STEPS + 2))
    assert more.returncode == 0, ending(more, run)
    rows = metrics_of(run)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 3))
    assert max(row["sample/staleness_max"] for row in rows) <= 1
    check_tokens_are_kept_secret(run, files, result.stdout + result.stderr + more.stdout + more.stderr)


def check_tokens_are_kept_secret(run, files, printed):
    """Every process had its token from its environment: it is in no file of the run and in no log."""
    secrets = [file.read_text().strip() for file in files]
    secrets += [role_token(secret, role) for secret in secrets for role in CLIENT_ROLES]
    written = [path.read_bytes() for path in run.rglob("*") if path.is_file() and path.suffix != ".safetensors"]
    assert len(written) > 10
    for secret in secrets:
        assert secret not in printed
        assert not any(secret.encode() in content for content in written)
    for name in ("hub", "engine", "env", "trainer"):
        log = (run / "logs" / f"{name}.log").read_text()
        assert "report_refused" not in log
        assert "status 401" not in log


@pytest.mark.full  # test_interruptions.py compares two runs of one seed in the same way
def test_the_same_seed_gives_the_same_curve(model, tmp_path):
    curves = []
    for attempt in ("a", "b", "c"):
        seed = "8" if attempt == "c" else "7"
        result, run = run_treadle(tmp_path / attempt, "--model", str(model), "--steps", "6", "--seed", seed, *TINY_RUN)
        assert result.returncode == 0, ending(result, run)
        curves.append([(row["reward"], row["grad_norm"], row["policy_loss"]) for row in metrics_of(run)])
    assert curves[0] == curves[1]  # to the last bit
    assert curves[0] != curves[2]
