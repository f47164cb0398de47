"""Ctrl-C, deaths and kills of a real run: it ends in order, leaves nobody behind, and can go on as if undisturbed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from tests.e2e.processes import environment
from tests.e2e.runs import TINY_RUN, command, metrics_of, newest_run, run_treadle
from tests.tiny_model import write_tiny_model

STEPS = "12"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def undisturbed(model, tmp_path_factory):
    result, run = run_treadle(tmp_path_factory.mktemp("calm"), "--model", str(model), "--steps", STEPS, *TINY_RUN)
    assert result.returncode == 0, result.stdout + result.stderr
    return run


def start(output: Path, model: Path) -> subprocess.Popen:
    return subprocess.Popen(
        command(output, "--model", str(model), "--steps", STEPS, *TINY_RUN),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment(),
    )  # fmt: skip


def wait_for_step(output: Path, process: subprocess.Popen, step: int) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        assert process.poll() is None, process.stdout.read()
        file = newest_run(output) / "metrics.jsonl"
        if file.is_file() and len(file.read_text().splitlines()) >= step:
            return
        time.sleep(0.05)
    raise AssertionError(f"step {step} was not reached")


def children_of(process: subprocess.Popen) -> dict[str, psutil.Process]:
    """Our processes by verb: {"hub": ..., "engine": ..., "env": ..., "train": ...}."""
    found = {}
    for child in psutil.Process(process.pid).children(recursive=True):
        words = child.cmdline()
        if "treadle" in words:
            found[words[words.index("treadle") + 1]] = child
    return found


def assert_all_gone(children: dict[str, psutil.Process], within_s: float) -> None:
    _, alive = psutil.wait_procs(list(children.values()), timeout=within_s)
    assert not alive, f"orphans: {alive}"


def shared_files(run: Path) -> set[str]:
    return {name for name in os.listdir("/dev/shm") if name.startswith(f"treadle-{run.name}-")}


def essence(run: Path) -> list[tuple[float, ...]]:
    keys = ("step", "reward", "policy_loss", "grad_norm", "entropy", "num_tokens")
    return [tuple(row[key] for key in keys) for row in metrics_of(run)]


def final_weights(run: Path) -> bytes:
    return (run / "checkpoints" / "final_model" / "model.safetensors").read_bytes()


def resume(run: Path) -> None:
    result = subprocess.run(
        [*command(run.parent)[:4], "--resume", str(run), "--plain"],
        capture_output=True, text=True, env=environment(), timeout=200, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr


def test_ctrl_c_stops_in_order_and_the_resumed_run_equals_an_undisturbed_one(model, undisturbed, tmp_path):
    process = start(tmp_path, model)
    wait_for_step(tmp_path, process, 5)
    assert shared_files(newest_run(tmp_path))
    children = children_of(process)
    assert set(children) == {"hub", "engine", "env", "train"}
    asked = time.monotonic()
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=30)
    seconds = time.monotonic() - asked
    print(f"stopped in {seconds:.1f} s")
    assert seconds < 10
    assert process.returncode == 130
    run = newest_run(tmp_path)
    assert f"run --resume {run}" in output
    assert_all_gone(children, 0.5)
    assert not shared_files(run)
    resume(run)
    assert essence(run) == essence(undisturbed)
    assert final_weights(run) == final_weights(undisturbed)


@pytest.mark.parametrize("victim", ["hub", "engine", "env", "train"])
def test_a_process_that_dies_takes_the_run_down_with_its_name(victim, model, undisturbed, tmp_path):
    process = start(tmp_path, model)
    wait_for_step(tmp_path, process, 5)
    children = children_of(process)
    children[victim].kill()
    output, _ = process.communicate(timeout=30)
    name = {"train": "trainer"}.get(victim, victim)
    assert process.returncode == 1
    assert f"{name} died (exit code -9" in output
    assert re.search(r"the end of its log:\n  \| 20\d\d-.* INFO ", output)
    assert_all_gone(children, 0.5)
    run = newest_run(tmp_path)
    resume(run)
    assert essence(run) == essence(undisturbed)
    assert final_weights(run) == final_weights(undisturbed)


def test_a_killed_launcher_leaves_no_orphan(model, tmp_path):
    process = start(tmp_path, model)
    wait_for_step(tmp_path, process, 3)
    children = children_of(process)
    assert len(children) == 4
    process.kill()
    process.wait()
    assert_all_gone(children, 12)
