"""Runs on Ray, with four node processes on this machine. Ray is in .venv-ray: scripts/setup-ray.sh."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import psutil
import pytest

from tests.e2e.processes import environment, last_lines
from tests.e2e.runs import metrics_of, newest_run, values_by_step
from tests.tiny_model import write_tiny_model
from treadle.net.access_tokens import role_token

ROOT = Path(__file__).parents[2]
RAY = next(iter((ROOT / ".venv-ray").glob("lib/python*/site-packages")), None)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.full,  # tests/unit/launch/test_launch_restarts.py and test_launch_machines.py: decisions and places
    pytest.mark.skipif(RAY is None, reason="scripts/setup-ray.sh installs Ray"),
]
STEPS = 120
FLAGS = (
    "--on", "ray", "--cluster.nodes", "2", "--env.name", "echo", "--env.task", "digits", "--env.group-size", "4",
    "--env.max-token-length", "2", "--env.num-eval", "10", "--train.batch-size", "16", "--train.lr", "2e-3",
    "--train.checkpoint-interval", "2", "--engine.dtype", "float32", "--engine.engine", "transformers",
    "--steps", str(STEPS), "--train.threads", "1", "--engine.threads", "1", "--plain",
)  # fmt: skip


def with_ray() -> dict[str, str]:
    paths = [str(ROOT / "src"), str(ROOT), str(RAY), os.environ.get("PYTHONPATH", "")]
    # A busy machine takes longer to start a node than Ray waits.
    waits = {"RAY_raylet_start_wait_time_s": "240", "RAY_USAGE_STATS_ENABLED": "0"}
    return environment(PYTHONPATH=os.pathsep.join(filter(None, paths)), **waits)


class Nodes:
    """A cluster of a head, which runs nothing, and further nodes."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.address = self._said()

    def kill(self, node: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(node + "\n")
        self._process.stdin.flush()
        assert self._said() == "killed"

    def _said(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline().strip()
        assert line, "the cluster has ended"
        return line


@contextmanager
def ray_nodes(num_nodes: int = 3) -> Iterator[Nodes]:
    command = [sys.executable, str(Path(__file__).with_name("ray_nodes.py")), str(num_nodes)]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=with_ray()
    )
    try:
        yield Nodes(process)
    finally:
        assert process.stdin is not None
        process.stdin.close()
        process.wait(60)


class Run:
    """A run that was started, and its folder."""

    def __init__(self, output: Path, model: Path, nodes: Nodes, *flags: str) -> None:
        self._output = output
        self._log = output.with_suffix(".log")
        command = [sys.executable, "-m", "treadle", "run", "--output", str(output), "--model", str(model)]
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                [*command, "--address", nodes.address, *FLAGS, *flags], stdout=log, stderr=log, env=with_ray()
            )

    @property
    def folder(self) -> Path:
        return newest_run(self._output)

    def last_step(self) -> int:
        file = self.folder / "metrics.jsonl"
        return max((row.get("step", 0) for row in metrics_of(self.folder)), default=0) if file.is_file() else 0

    def until(self, condition: Callable[[], bool], what: str, seconds: float = 240) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert self.process.poll() is None, f"ended before {what}:\n{last_lines(self._log.read_text())}"
            assert time.monotonic() < deadline, f"not {what} after {seconds} s:\n{last_lines(self._log.read_text())}"
            time.sleep(0.1)

    def kill(self, verb: str) -> None:
        """SIGKILL to the process of this run that has the verb ("env")."""
        process_of(self.folder, verb).kill()

    def end(self) -> None:
        assert self.process.wait(300) == 0, last_lines(self._log.read_text())


def process_of(folder: Path, verb: str) -> psutil.Process:
    return next(process for process in processes_of(folder) if process.cmdline()[2:4] == ["treadle", verb])


def processes_of(folder: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if str(folder) in " ".join(process.cmdline()):
                found.append(process)
    return found


def test_processes_start_again_after_their_end_and_that_of_a_machine(tmp_path: Path) -> None:
    """Real actors, a real loss of a node, and small processes instead of those of a run."""
    lives = tmp_path / "lives"

    def started() -> list[tuple[str, int]]:
        lines = lives.read_text().split() if lives.exists() else []
        return [(name, int(pid)) for name, pid in zip(lines[::2], lines[1::2], strict=True)]

    def until(num_started: int) -> None:
        deadline = time.monotonic() + 120
        while len(started()) < num_started:
            assert time.monotonic() < deadline, started()
            time.sleep(0.1)

    with ray_nodes() as nodes:
        command = [sys.executable, str(Path(__file__).with_name("ray_supervised.py")), nodes.address, str(tmp_path)]
        supervised = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=with_ray()
        )
        try:
            assert supervised.stdout is not None
            machines = supervised.stdout.readline().split()
            until(3)
            os.kill(dict(started())["env"], signal.SIGKILL)
            until(4)
            os.kill(dict(started())["engine"], signal.SIGKILL)
            until(7)
            nodes.kill(machines[2])  # the second machine: trainer and environment
            until(9)
            (tmp_path / "end").touch()
            said = supervised.communicate(timeout=60)[0].splitlines()
        finally:
            supervised.kill()
    names = [name for name, _ in started()]
    assert (names[3], sorted(names[4:7])) == ("env", ["engine", "env", "trainer"]), "an engine starts with its callers"
    assert sorted(names[7:]) == ["env", "trainer"]
    assert [line.split()[1] for line in said if line.startswith("again")] == ["env", "engine", "env", "trainer"]
    assert said[-1] == "ended"
    assert not [pid for _, pid in started() if psutil.pid_exists(pid)]


def test_a_run_with_kills_ends_with_the_result_of_an_undisturbed_one(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model", hidden_size=32, num_layers=2)
    with ray_nodes() as nodes:
        calm = Run(tmp_path / "calm", model, nodes)
        calm.end()
        run = Run(tmp_path / "killed", model, nodes)
        try:
            run.until(lambda: run.last_step() >= 4, "training")
            run.kill("env")
            run.until(lambda: run.last_step() >= 12, "training after a new environment")
            run.kill("engine")
            run.until(lambda: run.last_step() >= 20, "training after a new engine")
            node = re.findall(r"machine 1 is (\w+)", (tmp_path / "killed.log").read_text())[-1]
            nodes.kill(node)
            run.end()
        finally:
            run.process.kill()
        summary = (run.folder / "summary.json").read_text()
    for name in ("env", "engine", "trainer"):
        assert f"{name} died after step" in summary, summary
    expected = values_by_step(calm.folder)
    assert len(expected) == STEPS
    assert sum(bool(grad_norm) for _, _, grad_norm in expected.values()) > 10, "something is learned"
    assert values_by_step(run.folder) == expected
    last = "checkpoints/final_model/model.safetensors"
    assert (run.folder / last).read_bytes() == (calm.folder / last).read_bytes()


def test_the_machine_of_one_of_several_engines_may_be_lost(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model", hidden_size=32, num_layers=2)
    log = tmp_path / "runs.log"
    with ray_nodes(4) as nodes:
        run = Run(tmp_path / "runs", model, nodes, "--cluster.nodes", "3", "--engines", "2", "--steps", "1000")
        try:
            run.until(lambda: run.last_step() >= 3, "training")
            assert re.search(r"machine 1 is \w+ \(\S+\): engine-1\n", log.read_text()), log.read_text()
            nodes.kill(re.findall(r"machine 1 is (\w+)", log.read_text())[-1])
            lost_at = run.last_step()
            run.until(lambda: run.last_step() >= lost_at + 5, "training without the engine of the lost machine")
            starts = run.folder / "logs" / "engine-1.log"
            run.until(lambda: starts.read_text().count("engine listening") == 2, "a new start of the lost engine")
            run.until(lambda: serving(run.folder) == ["engine", "engine-1"], "a proof by the lost engine")
        finally:
            run.process.kill()


def serving(folder: Path) -> list[str]:
    """The engines that serve, by the hub's table."""
    hub = json.loads((folder / "config.json").read_text())["derived"]["hub"]
    token = role_token(Path(hub["token_file"]).read_text().strip(), "observer")
    url, headers = f"http://{hub['host']}:{hub['port']}/v1/engines", {"Authorization": f"Bearer {token}"}
    table = httpx.get(url, headers=headers).raise_for_status().json()
    return [entry["name"] for entry in table["engines"] if entry["state"] == "serving"]


def test_no_process_is_left_when_the_launcher_is_killed(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model", hidden_size=32, num_layers=2)
    with ray_nodes() as nodes:
        run = Run(tmp_path / "runs", model, nodes)
        run.until(lambda: run.last_step() >= 2, "training")
        assert len(processes_of(run.folder)) >= 4
        run.process.kill()
        run.process.wait()
        deadline = time.monotonic() + 60
        while left := processes_of(run.folder):
            assert time.monotonic() < deadline, left
            time.sleep(0.2)
