"""A machine of the cluster is lost: what waits for another one, and what goes on meanwhile."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from treadle.errors import ProcessDied
from treadle.launch import ray_cluster
from treadle.launch import supervisor as supervisor_module
from treadle.launch.placement import LocalPlacement, LocalProcess
from treadle.launch.process_spec import ProcessSpec
from treadle.launch.ray_cluster import RayProcess
from treadle.launch.restarts import Progress, Replacements, TrainerRestarts
from treadle.launch.supervisor import Stopped, StopRequest, Supervisor

UNTIL_FILE = "import pathlib, time\nwhile not pathlib.Path({file!r}).exists(): time.sleep(0.02)"
# Writes that it lives, then is killed like the processes of a lost machine, once.
LOST = """
import os, pathlib, signal, time
lives = pathlib.Path({lives!r})
with lives.open("a") as file: file.write("x")
if len(lives.read_text()) == 1: os.kill(os.getpid(), signal.SIGKILL)
time.sleep(60)
"""


class Machines(LocalPlacement):
    """Places processes here, as if on machines of a cluster, some of which are lost when their process ends."""

    def __init__(self, *lost: str) -> None:
        super().__init__()
        self.lost = set(lost)
        self._started: set[str] = set()

    def has_machine(self, spec: ProcessSpec) -> bool:
        return spec.name not in self.lost

    def start(self, spec: ProcessSpec) -> LocalProcess:
        if spec.name in self._started and spec.name in self.lost:
            time.sleep(20)
            raise ProcessDied("the cluster has found no machine", fix="")
        self._started.add(spec.name)
        return super().start(spec)


def supervised(machines: Machines, stop: StopRequest | None = None, **more: Any) -> Supervisor:
    progress, said = iter(Progress(step, 0) for step in range(100)), []
    return Supervisor(
        stop or StopRequest(),
        placement=machines,
        restarts=TrainerRestarts(3, lambda: next(progress), said.append),
        replacements=Replacements(3, lambda: next(progress), lambda *_: None, lambda: True),
        **more,
    )


def start_and_watch(supervisor: Supervisor, spec: ProcessSpec) -> None:
    supervisor.start([spec])
    supervisor.watch()


def test_a_run_goes_on_without_the_environment_of_a_lost_machine(make_spec, tmp_path: Path) -> None:
    is_over, lives, died = tmp_path / "over", tmp_path / "lives", tmp_path / "died"
    wait = UNTIL_FILE.format(file=str(is_over))
    machines, began = Machines("env-1"), time.monotonic()
    with supervised(machines) as supervisor:
        supervisor.start([make_spec("trainer", wait), make_spec("env-1", LOST.format(lives=str(lives)))])
        supervisor.wait(lambda: "env-1" not in supervisor.pids)
        supervisor.start([make_spec("env-2", LOST.format(lives=str(died)))])
        supervisor.wait(lambda: died.exists() and died.read_text() == "xx")  # another death is acted upon
        machines.lost.clear()
        supervisor.wait(lambda: lives.read_text() == "xx")  # there is a machine again
        assert set(supervisor.pids) == {"trainer", "env-1", "env-2"}
        assert time.monotonic() - began < 15


def test_a_run_ends_well_although_an_environment_waits_for_a_machine(make_spec, tmp_path: Path) -> None:
    is_over = tmp_path / "over"
    machines = Machines("env-1")
    with supervised(machines) as supervisor:
        wait = UNTIL_FILE.format(file=str(is_over))
        supervisor.start([make_spec("trainer", wait), make_spec("env-1", LOST.format(lives=str(tmp_path / "lives")))])
        supervisor.wait(lambda: "env-1" not in supervisor.pids)
        is_over.touch()
        supervisor.watch()


def test_the_only_environment_waits_for_a_machine_within_the_limit(make_spec, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(supervisor_module, "MACHINE_WAIT_S", 0.5)
    with supervised(Machines("env")) as supervisor:
        supervisor.start([make_spec("trainer", "import time; time.sleep(60)")])
        with pytest.raises(ProcessDied, match=r"the machine of env was lost.* within 0 s"):
            start_and_watch(supervisor, make_spec("env", LOST.format(lives=str(tmp_path / "lives"))))


@pytest.mark.parametrize("is_stopped", [True, False], ids=["stopped", "too long"])
def test_ctrl_c_is_answered_while_a_trainer_waits_for_a_machine(make_spec, tmp_path, monkeypatch, is_stopped) -> None:
    monkeypatch.setattr(supervisor_module, "MACHINE_WAIT_S", 60.0 if is_stopped else 0.5)
    stop, lives, machines = StopRequest(), tmp_path / "lives", Machines("trainer")
    asked = []

    def tick() -> None:
        if is_stopped and machines.lost and len(asked) > 10:
            stop.count += 1

    def has_machine(spec: ProcessSpec) -> bool:
        asked.append(spec.name)
        return spec.name not in machines.lost

    machines.has_machine = has_machine
    began = time.monotonic()
    spec = make_spec("trainer", LOST.format(lives=str(lives)))
    ends_with = pytest.raises(Stopped if is_stopped else ProcessDied)
    with supervised(machines, stop, on_tick=tick) as supervisor, ends_with:
        start_and_watch(supervisor, spec)
    assert set(asked) == {"trainer"}
    assert time.monotonic() - began < 15


class FakeRay:
    """As much of Ray as a process uses, whose calls never end."""

    class exceptions:
        RayError = RuntimeError
        RayTaskError = LookupError

    def __init__(self) -> None:
        self.killed: list[Any] = []

    def wait(self, references: list[Any], timeout: float) -> tuple[list[Any], list[Any]]:
        return [], references

    def get(self, reference: Any, timeout: float) -> Any:
        raise RuntimeError(f"no answer within {timeout} s")

    def kill(self, actor: Any) -> None:
        self.killed.append(actor)


@pytest.fixture
def unanswered():
    """A process in an actor that does not start, and the machines."""
    call = SimpleNamespace(remote=lambda *_: object())
    actor = SimpleNamespace(start=call, wait=call, terminate=call, kill=call)
    ray, losses = FakeRay(), []
    machines = SimpleNamespace(ray=ray, actor=lambda *_, **__: actor, note_loss=lambda: losses.append(1))
    spec = ProcessSpec("env", ("true",), {}, Path("env.log"))
    return SimpleNamespace(start=lambda: RayProcess(machines, spec), actor=actor, ray=ray, losses=losses)


def test_an_actor_that_does_not_start_in_time_is_killed(unanswered, monkeypatch) -> None:
    monkeypatch.setattr(ray_cluster, "RESERVE_S", 0.2)
    process = unanswered.start()
    deadline = time.monotonic() + 10
    while process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert process.poll() == -signal.SIGKILL
    assert unanswered.ray.killed == [unanswered.actor], "a late start would run beside its replacement"
    assert unanswered.losses, "the next start waits until its process has ended"


@pytest.mark.parametrize("how", ["terminate", "kill"])
def test_an_actor_that_has_not_started_is_ended_at_once(unanswered, how: str) -> None:
    process = unanswered.start()
    assert process.poll() is None
    getattr(process, how)()
    assert process.poll() == -signal.SIGKILL
    assert set(map(id, unanswered.ray.killed)) == {id(unanswered.actor)}
