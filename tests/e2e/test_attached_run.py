"""`treadle run` with a hub and an engine that were started apart: it starts the rest, and leaves both running."""

from __future__ import annotations

import json
import os

import httpx
import pytest

from tests.e2e.processes import free_port, running, wait_until_healthy
from tests.e2e.runs import TINY_RUN, ending, metrics_of, resume, run_treadle
from tests.hub_process import HubProcess
from tests.tiny_model import write_tiny_model
from treadle.doctor.command import DoctorTarget, check_live
from treadle.launch.top import watch_run
from treadle.report.page import write_report

TOKEN = "a-token-of-a-test-0123456789"  # noqa: S105


def small_run() -> list[str]:
    """The flags of TINY_RUN without the engine's, which this run does not start."""
    words = list(TINY_RUN)
    while index := next((i for i, word in enumerate(words) if word.startswith("--engine.")), 0):
        del words[index : index + 2]
    return [*words, "--env.num-eval", "2"]


@pytest.mark.parametrize("goes_on", [False, pytest.param(True, marks=pytest.mark.full)])
def test_a_run_uses_a_hub_and_an_engine_that_run_already(goes_on, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TREADLE_HUB_TOKEN", TOKEN)
    monkeypatch.setenv("TREADLE_ENGINE_TOKEN", TOKEN)
    model = write_tiny_model(tmp_path / "tiny")
    engine_port, log = free_port(), tmp_path / "engine.log"
    url = f"http://127.0.0.1:{engine_port}"
    served = ("--model", str(model), "--dtype", "float32", "--max-num-seqs", "160", "--device", "cpu")
    with (
        HubProcess(tmp_path) as hub,
        running("engine", *served, "--engine", "transformers", "--port", str(engine_port), log=log) as engine,
    ):
        wait_until_healthy(f"{url}/health", engine, log)
        runs = tmp_path / "runs"
        result, run = run_treadle(runs, "--hub-url", hub.url, "--engine-url", url, "--steps", "2", *small_run())
        assert result.returncode == 0, ending(result, run)
        assert [row["step"] for row in metrics_of(run)] == [1, 2]
        assert {file.stem for file in (run / "logs").iterdir()} == {"env", "trainer"}
        assert "the trainer broadcasts new ones to it" in result.stdout
        assert TOKEN not in result.stdout + (run / "config.json").read_text()
        assert not (run / "hub.sqlite").exists()
        config = json.loads((run / "config.json").read_text())
        assert (config["hub_url"], config["engine_url"], config["model"]) == (hub.url, [url], str(model))
        assert (config["hub"], config["engine"]) == ({}, {}), "settings of servers that the run did not start"
        assert "use_shared_memory" not in config["train"]

        steps = 3 if goes_on else 2
        if goes_on:  # with the same servers
            again = resume(run, "--steps", "3")
            assert again.returncode == 0, ending(again, run)
        assert len(metrics_of(run)) == steps
        assert hub.process is not None
        assert hub.process.poll() is engine.poll() is None  # neither is the launcher's to stop
        headers = {"Authorization": f"Bearer {TOKEN}"}
        assert httpx.get(f"{hub.url}/v1/status", headers=headers).json()["step"] == steps
        assert httpx.get(f"{url}/health", headers=headers).json()["policy_version"] == steps

        assert watch_run(run, plain=True, once=True) == 0
        assert f"step {steps}/{steps}" in capsys.readouterr().out
    assert write_report(run, None) == 0
    assert not [check for check in check_live(DoctorTarget(run), os.environ) if check.verdict == "problem"]
