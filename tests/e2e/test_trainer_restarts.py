"""Trainer ranks of `treadle run` that are killed: the run starts all of them again and takes all its steps."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import psutil
import pytest

from tests.e2e.processes import end_of, environment, free_port, last_lines, running, wait_until_healthy
from tests.e2e.runs import TINY_RUN, command
from tests.e2e.test_interruptions import LaunchedRun
from tests.e2e.test_several_trainers import post_groups
from tests.hub_process import HubProcess
from tests.tiny_model import write_tiny_model

STEPS = 10  # each takes a fraction of a second: a rank is killed after the third, and must not come too late


def rank_of(launched: LaunchedRun, rank: int) -> psutil.Process:
    """The process of a rank of the trainer."""
    for child in psutil.Process(launched.process.pid).children():
        words = child.cmdline()
        own = int(words[words.index("--trainer-rank") + 1]) if "--trainer-rank" in words else 0
        if "train" in words and own == rank:
            return child
    raise AssertionError(f"there is no rank {rank}")


def start(tmp_path: Path, *flags: str) -> LaunchedRun:
    model = write_tiny_model(tmp_path / "model", hidden_size=32, num_layers=1)
    words = command(
        tmp_path / "runs", "--model", str(model), "--steps", str(STEPS), *TINY_RUN, "--env.num-eval", "0", *flags
    )
    return LaunchedRun(words, tmp_path / "runs")


def finish(launched: LaunchedRun) -> str:
    output, _ = launched.process.communicate(timeout=300)
    assert launched.process.returncode == 0, last_lines(output)
    return output


def assert_complete(run: Path, num_ranks: int) -> None:
    """All files of a run that was not interrupted: each step once, the checkpoints of the interval, the result."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "step" in row] == list(range(1, STEPS + 1))
    saved = {path.name for path in (run / "checkpoints").iterdir() if path.name.startswith("step_")}
    assert saved == {f"step_{STEPS - 2}", f"step_{STEPS}"}
    names = {path.name for path in (run / "checkpoints" / f"step_{STEPS}").iterdir()}
    assert {"model.safetensors", "state-000.tensors", "trainer.json"} < names
    assert (run / "checkpoints" / "final_model" / "model.safetensors").is_file()
    assert {path.name for path in (run / "tokens").iterdir()} == {
        f"step-{step:06}.rank-{rank}" for step in range(1, STEPS + 1) for rank in range(num_ranks)
    }
    logs = {path.stem for path in (run / "logs").iterdir()}
    assert logs == {"hub", "engine", "env", *(f"trainer-{rank}" if rank else "trainer" for rank in range(num_ranks))}


@pytest.mark.slow
def test_a_run_goes_on_by_itself_after_a_rank_was_killed(tmp_path):
    launched = start(tmp_path, "--train.ranks", "2")
    try:
        launched.wait_for_step(3)
        rank_of(launched, 1).kill()
        output = finish(launched)
    finally:
        launched.end()
    line = r"restart: trainer-1 died after step (\d+): exit code -9, ended by SIGKILL.*; all 2 ranks start again from "
    said = re.search(line + r"the checkpoint of step (\d+) \(restart 1 of 3\)", output)
    assert said, output
    step, checkpoint = map(int, said.groups())
    assert 3 <= step < STEPS
    assert checkpoint in (step - step % 2, step - step % 2 - 2), "one that was being written does not count"
    assert_complete(launched.run, num_ranks=2)
    summary = json.loads((launched.run / "summary.json").read_text())
    assert (summary["is_complete"], len(summary["restarts"])) == (True, 1)
    assert {"trainer", "trainer-1"} <= summary["peak_memory_by_process"].keys()
    assert "launcher restart trainer-1 died" in (launched.run / "logs" / "trainer.log").read_text()


@pytest.mark.slow
@pytest.mark.full
def test_a_trainer_killed_before_its_first_checkpoint_begins_again(tmp_path):
    """One copy of the weights: the engine serves trained ones, and loads its own again."""
    launched = start(tmp_path, "--train.checkpoint-interval", "100", "--train.single-copy")
    try:
        launched.wait_for_step(2)
        rank_of(launched, 0).kill()
        output = finish(launched)
    finally:
        launched.end()
    assert "the trainer starts again from step 0, without a checkpoint (restart 1 of 3)" in output
    log = (launched.run / "logs" / "trainer.log").read_text()
    assert "engine_reset version=" in log
    rows = [json.loads(line) for line in (launched.run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))


@pytest.mark.slow
@pytest.mark.full
def test_ctrl_c_stops_all_ranks_after_the_same_step(tmp_path):
    launched = start(tmp_path, "--train.ranks", "2", "--steps", "1000", "--train.checkpoint-interval", "1000")
    try:
        launched.wait_for_step(2)
        children = launched.children()
        launched.process.send_signal(signal.SIGINT)
        output, _ = launched.process.communicate(timeout=60)
    finally:
        launched.end()
    assert launched.process.returncode == 130, last_lines(output)
    (saved,) = (path for path in (launched.run / "checkpoints").iterdir() if path.name.startswith("step_"))
    manifest = json.loads((saved / "trainer.json").read_text())
    rows = [json.loads(line) for line in (launched.run / "metrics.jsonl").read_text().splitlines()]
    assert manifest["step"] == rows[-1]["step"]
    assert not [child for child in children.values() if child.is_running()]


def wait_for(text: str, log: Path, times: int = 1, timeout_s: float = 120) -> None:
    deadline = time.monotonic() + timeout_s
    while not log.is_file() or log.read_text().count(text) < times:
        assert time.monotonic() < deadline, f"no '{text}':\n{end_of(log)}"
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.full
def test_torchrun_starts_the_ranks_again_with_max_restarts(tmp_path):
    """Before the first checkpoint: the engine has adopted a version, and loads its own weights again."""
    model = write_tiny_model(tmp_path / "model", hidden_size=32, num_layers=1)
    port, engine_log, log = free_port(), tmp_path / "engine.log", tmp_path / "trainers.log"
    engine_url = f"http://127.0.0.1:{port}"
    engine_flags = ("--model", str(model), "--port", str(port), "--dtype", "float32", "--threads", "1")
    with (
        HubProcess(tmp_path) as hub,
        running("engine", *engine_flags, "--weights-file", str(tmp_path / "shared.weights"), log=engine_log) as engine,
    ):
        wait_until_healthy(f"{engine_url}/health", engine, engine_log)
        words = [
            sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "2",
            "--master-port", str(free_port()), "-m", "treadle", "train", "--model", str(model), "--device", "cpu",
            "--hub-url", hub.url, "--engine-url", engine_url, "--save-path", str(tmp_path / "out"), "--steps", "3",
            "--batch-size", "4", "--lr", "0.001", "--warmup-steps", "0", "--share-prompts", "off",
        ]  # fmt: skip
        with log.open("ab") as output:
            trainers = subprocess.Popen(words, stdout=output, stderr=output, env=environment())
        try:
            wait_for("trainer ready", log)
            post_groups(hub, 2)
            wait_for("trainer step step=1", log)
            (victim,) = (
                child
                for child in psutil.Process(trainers.pid).children(recursive=True)
                if child.environ().get("RANK") == "1"
            )
            victim.kill()
            wait_for("trainer ready", log, times=2)
            post_groups(hub, 4)
            assert trainers.wait(120) == 0, end_of(log)
        finally:
            trainers.kill()
            trainers.wait()
        assert "engine_reset version=1" in log.read_text()
        answer = httpx.post(f"{engine_url}/generate", json={"prompt": {"prompt_token_ids": [5, 6]}, "max_tokens": 1})
        assert answer.json()["policy_version"] == 3
    assert (tmp_path / "out" / "final_model" / "model.safetensors").is_file()
