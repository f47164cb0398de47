"""An environment with pace stream and real hub, engine and trainer: killed, disconnected and resumed."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import ExitStack

import httpx
import pytest

from tests.e2e.processes import end_of, environment, free_port, running, wait_until_healthy
from tests.e2e.runs import TINY_RUN, ending, metrics_of, run_treadle
from tests.tiny_model import write_tiny_model

STEPS = 12
GUESS = '''
"""Say the digit. Two turns; written as a user would."""

from treadle.envs import Environment, Item, environment


@environment("guess")
class Guess(Environment):
    def train_item(self, index):
        return Item.ask(f"Say {index % 10}", answer=str(index % 10))

    def eval_items(self):
        return [self.train_item(index) for index in range(4)]

    async def rollout(self, item, model):
        chat = model.chat(item.messages)
        first = await chat.ask()
        chat.add({"role": "user", "content": "Again"})
        last = await chat.ask()
        return (item.answer in first.text) + 0.5 * (item.answer in last.text)
'''


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def task(tmp_path):
    file = tmp_path / "guess.py"
    file.write_text(GUESS)
    return file


class Run:
    """Hub, engine and trainer; environments come and go."""

    def __init__(self, folder, model, stack):
        self.folder, self.stack = folder, stack
        self.hub_port, engine_port = free_port(), free_port()
        self.hub_url, self.engine_url = f"http://127.0.0.1:{self.hub_port}", f"http://127.0.0.1:{engine_port}"
        self.start_hub()
        engine = self._start(
            "engine", "--model", str(model), "--port", str(engine_port), "--dtype", "float32",
            "--engine", "transformers", "--weights-file", str(folder / "weights.bin"),
        )  # fmt: skip
        wait_until_healthy(f"{self.engine_url}/health", engine, folder / "engine.log")
        self.trainer = self._start(
            "train", "--model", str(model), "--training-steps", str(STEPS), "--batch-size", "24",
            "--gradient-accumulation-steps", "1", "--hub-url", self.hub_url, "--engine-url", self.engine_url,
            "--save-path", str(folder / "checkpoints"), "--lr", "1e-3", "--weight-bridge-mode", "shared_vllm",
            "--seq-len", "128", "--device", "cpu",
        )  # fmt: skip

    def start_hub(self):
        self.hub = self._start("hub", "--port", str(self.hub_port), "--database", str(self.folder / "hub.sqlite"))
        wait_until_healthy(f"{self.hub_url}/healthz", self.hub, self.folder / "hub.log")

    def start_env(self, task):
        return self._start(
            "env", str(task), "serve", "--env.hub-url", self.hub_url, "--openai.base-url", self.engine_url,
            "--env.group-size", "4", "--env.max-token-length", "3", "--env.state-dir", str(self.folder / "state"),
            "--env.num-eval", "0",
        )  # fmt: skip

    def _start(self, verb, *flags):
        return self.stack.enter_context(running(verb, *flags, log=self.folder / f"{verb}.log"))

    def status(self):
        return httpx.get(f"{self.hub_url}/v1/status").json()

    def wait_for_step(self, step, timeout_s=90):
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            assert self.trainer.poll() in (None, 0), end_of(self.folder / "train.log")
            try:
                if self.status()["step"] >= step:
                    return
            except httpx.TransportError:
                assert self.trainer.poll() is None
            time.sleep(0.05)
        logs = [self.folder / f"{verb}.log" for verb in ("env", "train", "engine", "hub")]
        raise AssertionError(f"step {step} was not reached:\n{end_of(*logs)}")

    def items(self):
        with sqlite3.connect(self.folder / "hub.sqlite") as db:
            return [item for (item,) in db.execute("SELECT item FROM groups ORDER BY id")]


@pytest.mark.full  # test_interruptions.py kills both in a run
def test_a_killed_environment_and_hub_continue_without_loss(model, task, tmp_path):
    with ExitStack() as stack:
        run = Run(tmp_path, model, stack)
        first = run.start_env(task)
        run.wait_for_step(3)
        os.kill(first.pid, signal.SIGKILL)
        first.wait()
        before = run.status()["accepted_groups"]
        assert before >= 3 * 6
        env = run.start_env(task)
        run.wait_for_step(6)
        os.kill(run.hub.pid, signal.SIGKILL)
        run.hub.wait()
        time.sleep(1.0)  # groups are scored meanwhile, and wait on disk
        run.start_hub()
        run.wait_for_step(STEPS)
        assert env.wait(30) == 0
        assert run.trainer.wait(30) == 0
        items = run.items()
        print(f"groups before the kill: {before}; at the end: {len(items)}; items: {len(set(items))}")
        assert len(items) == len(set(items)), "an item was delivered twice"
        assert set(range(max(items) + 1)) - set(items) == set(), "an item was skipped"
        assert run.status()["trained_groups"] == STEPS * 6
        assert not list((tmp_path / "state").glob("*/spool/*.groups"))


@pytest.mark.full  # test_hangs.py trains a file of the user's by the launcher, test_learning.py resumes a finished run
def test_the_launcher_trains_a_file_in_the_streams_pace_and_resumes_it(model, task, tmp_path):
    flags = ("--model", str(model), *TINY_RUN, "--env.name", str(task), "--env.task", "", "--env.max-token-length", "3")
    result, run = run_treadle(tmp_path / "runs", *flags, "--steps", "4")
    assert result.returncode == 0, ending(result, run)
    assert run.name.endswith("-guess")
    resume = [sys.executable, "-m", "treadle", "run", "--resume", str(run), "--steps", "7", "--plain"]
    more = subprocess.run(resume, capture_output=True, text=True, env=environment(), timeout=300, check=False)
    assert more.returncode == 0, ending(more, run)
    rows = metrics_of(run)
    assert [row["step"] for row in rows] == list(range(1, 8))
    assert max(row["sample/staleness_max"] for row in rows) <= 1
    assert all(
        (row["sampling/sampling_logp_difference/max"] or 0) < 1e-3 for row in rows if row["sample/staleness_max"] == 0
    )
