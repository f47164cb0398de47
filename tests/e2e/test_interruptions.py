"""A real run that is interrupted again and again: each time it ends in order and leaves no process behind, and at last
it equals a run that was never interrupted, bit for bit."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from tests.e2e.processes import environment, last_lines
from tests.e2e.runs import TINY_RUN, command, ending, metrics_of, newest_run, resume, run_treadle
from tests.tiny_model import write_tiny_model

STEPS = 12
# What ends the lives of a run, one every three steps. One run has them all: a start takes longer than the steps.
# Several names: they are killed at the same moment.
CTRL_C, LAUNCHER = ("ctrl-c",), "launcher"
CHAINS = [
    pytest.param((CTRL_C, ("hub", "engine", LAUNCHER)), id="Ctrl-C, then a crash"),
    pytest.param((("train", "env"),), id="trainer and environment", marks=pytest.mark.full),
    pytest.param((("hub",), ("engine",), ("env",)), id="each server alone", marks=pytest.mark.full),
    pytest.param((("train",), (LAUNCHER,)), id="trainer and launcher alone", marks=pytest.mark.full),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def undisturbed(model, tmp_path_factory):
    result, run = run_treadle(tmp_path_factory.mktemp("calm"), "--model", str(model), "--steps", str(STEPS), *TINY_RUN)
    assert result.returncode == 0, ending(result, run)
    return run


class LaunchedRun:
    """One process of `treadle run`, with the processes that it started."""

    def __init__(self, words: list[str], output: Path) -> None:
        self.process = subprocess.Popen(
            words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment()
        )
        self._output = output
        self._began = time.time()

    @property
    def run(self) -> Path:
        return newest_run(self._output)

    def wait_for_step(self, step: int) -> None:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            assert self.process.poll() is None, last_lines(self.process.stdout.read())
            file = self.run / "metrics.jsonl"
            is_of_this_life = file.is_file() and file.stat().st_mtime > self._began
            if is_of_this_life and len(file.read_text().splitlines()) >= step:
                return
            time.sleep(0.05)
        raise AssertionError(f"step {step} was not reached; the logs: {self.run / 'logs'}")

    def children(self) -> dict[str, psutil.Process]:
        """Our processes by verb: {"hub": ..., "engine": ..., "env": ..., "train": ...}."""
        found = {}
        for child in psutil.Process(self.process.pid).children(recursive=True):
            words = child.cmdline()
            if "treadle" in words:
                found[words[words.index("treadle") + 1]] = child
        return found

    def shared_files(self) -> set[str]:
        return {name for name in os.listdir("/dev/shm") if name.startswith(f"treadle-{self.run.name}-")}

    def interrupt(self) -> None:
        """Ctrl-C."""
        assert self.shared_files()
        asked = time.monotonic()
        self.process.send_signal(signal.SIGINT)
        output, _ = self.process.communicate(timeout=60)
        seconds = time.monotonic() - asked
        print(f"stopped in {seconds:.1f} s")
        assert seconds < 20  # two or three on an idle machine
        assert self.process.returncode == 130
        assert f"run --resume {self.run}" in output
        assert not self.shared_files()

    def lose(self, victims: tuple[str, ...]) -> None:
        """kill -9 of some of its processes."""
        children = self.children()
        for victim in victims:
            children[victim].kill()
        output, _ = self.process.communicate(timeout=60)
        assert self.process.returncode == 1
        names = [{"train": "trainer"}.get(victim, victim) for victim in victims]
        assert any(f"{name} died (exit code -9" in output for name in names), last_lines(output)
        assert re.search(r"the end of its log:\n  \| 20\d\d-.* INFO ", output)

    def lose_launcher(self, victims: tuple[str, ...]) -> None:
        """kill -9 of the launcher and of some of its processes: the others notice."""
        children = self.children()
        for victim in victims:
            (self.process if victim == LAUNCHER else children[victim]).kill()
        self.process.wait()

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


def assert_all_gone(children: dict[str, psutil.Process], within_s: float) -> None:
    _, alive = psutil.wait_procs(list(children.values()), timeout=within_s)
    assert not alive, f"orphans: {alive}"


def essence(run: Path) -> list[tuple[float, ...]]:
    keys = ("step", "reward", "policy_loss", "grad_norm", "entropy", "num_tokens")
    return [tuple(row[key] for key in keys) for row in metrics_of(run)]


def final_weights(run: Path) -> bytes:
    return (run / "checkpoints" / "final_model" / "model.safetensors").read_bytes()


@pytest.mark.parametrize("ends", CHAINS)
def test_a_run_that_lost_each_process_equals_an_undisturbed_one(model, undisturbed, tmp_path, ends):
    words = command(tmp_path, "--model", str(model), "--steps", str(STEPS), *TINY_RUN, "--max-restarts", "0")
    for step, end in zip(range(3, STEPS, 3), ends, strict=False):
        launched = LaunchedRun(words, tmp_path)
        try:
            launched.wait_for_step(step)
            children = launched.children()
            assert set(children) == {"hub", "engine", "env", "train"}
            print(f"step {step}: {' and '.join(end)}")
            if end == CTRL_C:
                launched.interrupt()
            elif LAUNCHER in end:
                launched.lose_launcher(end)
            else:
                launched.lose(end)
            assert_all_gone(children, 12 if LAUNCHER in end else 1)
        finally:
            launched.end()
        words = [*words[:4], "--resume", str(launched.run), "--plain"]
    last = subprocess.run(words, capture_output=True, text=True, env=environment(), timeout=200, check=False)
    assert last.returncode == 0, ending(last, launched.run)
    assert essence(launched.run) == essence(undisturbed)
    assert final_weights(launched.run) == final_weights(undisturbed)


def test_a_run_replaces_what_dies_and_equals_an_undisturbed_one(model, undisturbed, tmp_path):
    """The same without --resume: the launcher starts the servers again."""
    launched = LaunchedRun(
        command(tmp_path, "--model", str(model), "--steps", str(STEPS), *TINY_RUN), tmp_path
    )  # fmt: skip
    try:
        for step, victim in ((3, "env"), (5, "engine"), (9, "hub")):
            launched.wait_for_step(step)
            launched.children()[victim].kill()
        output, _ = launched.process.communicate(timeout=200)
    finally:
        launched.end()
    assert launched.process.returncode == 0, last_lines(output)
    summary = json.loads((launched.run / "summary.json").read_text())
    assert [line.split()[0] for line in summary["restarts"]] == ["env", "engine", "hub"]
    assert essence(launched.run) == essence(undisturbed)
    assert final_weights(launched.run) == final_weights(undisturbed)


@pytest.mark.full
def test_a_run_killed_after_its_last_checkpoint_is_finished_by_resume(undisturbed):
    """Last in this file: it changes the folder of the undisturbed run."""
    weights = final_weights(undisturbed)
    last_evaluation = max(undisturbed.glob("evals/*.json"), key=lambda path: path.stat().st_mtime)
    accuracy = json.loads(last_evaluation.read_text())["accuracy"]
    for written_later in (undisturbed / "checkpoints" / "final_model", undisturbed / "evals"):
        shutil.rmtree(written_later)
    (undisturbed / "summary.json").unlink()
    result = resume(undisturbed, timeout_s=120)
    assert result.returncode == 0, ending(result, undisturbed)
    summary = json.loads((undisturbed / "summary.json").read_text())
    assert (summary["is_complete"], summary["steps_taken"]) == (True, STEPS)
    assert summary["held_out_after"]["accuracy"] == accuracy
    assert final_weights(undisturbed) == weights
