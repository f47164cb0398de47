"""Trainer ranks that crash are started again: the decision (pure), and real processes under the supervisor."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from tests.e2e.processes import free_port
from treadle.errors import ProcessDied, UserError
from treadle.launch.process_spec import ProcessSpec
from treadle.launch.ranks import rank_variables
from treadle.launch.restarts import Progress, RankEnd, Replacements, TrainerRestarts, first_of, with_rendezvous
from treadle.launch.supervisor import StopRequest, Supervisor

LOST = RankEnd("trainer", 1, "rank 0 of 2 lost rank 1 (process 99) while adding up the gradients: Connection closed")
KILLED = RankEnd("trainer-1", -9, "", "exit code -9, ended by SIGKILL")


def restarts_at(*progress: Progress, max_restarts: int = 3) -> tuple[TrainerRestarts, list[str]]:
    said: list[str] = []
    return TrainerRestarts(max_restarts, iter(progress).__next__, said.append), said


def test_the_rank_that_took_the_others_down_is_named() -> None:
    assert first_of([LOST, KILLED]) is KILLED
    assert first_of([LOST]) is LOST
    cut_off = RankEnd("trainer", 1, "", "exit code 1", ("RuntimeError: Read error: Connection reset by peer.",))
    assert first_of([cut_off, KILLED]) is KILLED
    restarts, said = restarts_at(Progress(7, 4))
    assert restarts.refusal([LOST, KILLED], 2) == ""
    assert said == [
        "trainer-1 died after step 7: exit code -9, ended by SIGKILL; all 2 ranks start again from the checkpoint of "
        "step 4 (restart 1 of 3)"
    ]


@pytest.mark.parametrize(
    ("end", "is_restarted"),
    [
        (KILLED, True),
        (RankEnd("trainer", 1, "", "exit code 1", ("Traceback", "RuntimeError: CUDA error: unknown error")), True),
        (RankEnd("trainer", 1, "rank 0 of 2 did not find the others: the port is in use"), True),
        (RankEnd("trainer", 2, "there is no model smol"), False),
        (RankEnd("trainer", 1, "the engine's weights differ"), False),  # an error with a remedy
        (RankEnd("trainer", 1, "", "exit code 1", ("torch.OutOfMemoryError: CUDA out of memory.",)), False),
    ],
)
def test_only_a_crash_is_followed_by_a_restart(end: RankEnd, is_restarted: bool) -> None:
    restarts, _ = restarts_at(Progress(1, 0))
    assert (restarts.refusal([end], 1) == "") == is_restarted


def test_restarts_are_bounded_and_need_a_further_step() -> None:
    restarts, said = restarts_at(*(Progress(step, 0) for step in (1, 2, 3)), max_restarts=2)
    assert [restarts.refusal([KILLED], 1) for _ in range(3)] == [
        "", "", "it crashed again after 2 restarts (--max-restarts 2)",
    ]  # fmt: skip
    assert len(said) == 2
    restarts, _ = restarts_at(Progress(5, 4), Progress(5, 4))
    assert restarts.refusal([KILLED], 1) == ""
    assert restarts.refusal([KILLED], 1) == "it crashed again after 1 restart, before it had taken a further step"
    assert restarts_at(Progress(5, 4), max_restarts=0)[0].refusal([KILLED], 1) == "--max-restarts is 0"


@pytest.mark.parametrize(
    ("before", "now", "has_moved"),
    [
        (Progress(7, 4), Progress(8, 4), True),
        (Progress(7, 4), Progress(6, 4), True),  # steps 5 and 6 again
        (Progress(7, 4), Progress(4, 4), False),  # restored, and no step
        (Progress(7, 4), Progress(7, 4), False),  # not restored yet, or the same step again
        (Progress(7, 4), Progress(4, 6), True),
    ],
)
def test_progress_is_a_step_after_the_restart(before: Progress, now: Progress, has_moved: bool) -> None:
    assert now.has_moved_since(before) == has_moved


# ---- processes

CRASH_ONCE = """
import os, pathlib, signal, time
lives = pathlib.Path({lives!r})
num = len(lives.read_text()) if lives.exists() else 0
lives.write_text("x" * (num + 1))
print("port", os.environ["MASTER_PORT"], flush=True)
if num == 0: os.kill(os.getpid(), signal.SIGKILL)
"""
LOSE_ONCE = """
import os, pathlib, sys, time
other, own = pathlib.Path({other!r}), pathlib.Path({own!r})
print("port", os.environ["MASTER_PORT"], flush=True)
if not own.exists():
    own.write_text("x")
    while not other.exists(): time.sleep(0.01)
    time.sleep(0.3)
    sys.exit("treadle: rank 0 of 2 lost the others while adding up the gradients: closed")
"""


def wait_for_file(path: str | Path) -> str:
    return f"import pathlib, time\nwhile not pathlib.Path({str(path)!r}).exists(): time.sleep(0.01)\n"


def start_and_watch(supervisor: Supervisor, specs: list[ProcessSpec]) -> None:
    supervisor.start(specs)
    supervisor.watch()


def rank_specs(make_spec, *codes: str) -> list[ProcessSpec]:
    names = ("trainer", "trainer-1")
    specs = [make_spec(name, code) for name, code in zip(names, codes, strict=False)]
    for rank, spec in enumerate(specs):
        spec.env.update(rank_variables(rank, len(specs)))
    return specs


def test_all_ranks_start_again_on_another_port_after_one_was_killed(make_spec, tmp_path: Path) -> None:
    own, other = str(tmp_path / "own"), str(tmp_path / "other")
    specs = rank_specs(make_spec, LOSE_ONCE.format(other=other, own=own), CRASH_ONCE.format(lives=other))
    restarts, said = restarts_at(Progress(3, 2))
    with Supervisor(StopRequest(), restarts=restarts) as supervisor:
        start_and_watch(supervisor, specs)
    assert len(said) == 1
    assert said[0].startswith("trainer-1 died after step 3: exit code -9, ended by SIGKILL")
    ports = [spec.log_path.read_text().split() for spec in specs]
    ports = [[word for word in words if word.isdigit() and len(word) > 1] for words in ports]
    assert [len(own) for own in ports] == [2, 2]
    assert ports[0] == ports[1], "both ranks meet at the same port"
    assert ports[0][0] != ports[0][1]


def test_a_rank_that_hangs_is_killed_for_the_new_start(make_spec, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("treadle.launch.supervisor.RANKS_END_S", 0.7)
    lives, own = str(tmp_path / "lives"), str(tmp_path / "own")
    hangs = (
        f"import pathlib, time\nif not pathlib.Path({own!r}).exists():\n pathlib.Path({own!r}).touch(); time.sleep(60)"
    )
    crash = wait_for_file(own) + CRASH_ONCE.format(lives=lives)
    restarts, said = restarts_at(Progress(3, 2))
    with Supervisor(StopRequest(), restarts=restarts) as supervisor:
        start_and_watch(supervisor, rank_specs(make_spec, hangs, crash))
    assert len(said) == 1


def test_a_crash_that_is_not_repeated_names_the_rank_and_its_log(make_spec, tmp_path: Path) -> None:
    specs = rank_specs(
        make_spec,
        f"{wait_for_file(tmp_path / 'seen')}raise SystemExit(1)",
        "print('last line of rank 1'); raise SystemExit(1)",
    )

    def end_rank_0() -> None:
        if not psutil.pid_exists(supervisor.pids["trainer-1"]):  # its end was seen: it is not even a zombie
            (tmp_path / "seen").touch()

    restarts, _ = restarts_at(Progress(0, 0), max_restarts=0)
    with (
        Supervisor(StopRequest(), on_tick=end_rank_0, restarts=restarts) as supervisor,
        pytest.raises(ProcessDied) as caught,
    ):
        start_and_watch(supervisor, specs)
    assert "trainer-1 died (exit code 1), not started again: --max-restarts is 0" in str(caught.value)
    assert "| last line of rank 1" in str(caught.value)


def test_a_users_mistake_in_a_rank_is_reported_as_it_is(make_spec) -> None:
    mistake = "import sys; sys.stderr.write('treadle: no model\\n  -> --model\\n'); sys.exit(2)"
    restarts, said = restarts_at(Progress(0, 0))
    with Supervisor(StopRequest(), restarts=restarts) as supervisor, pytest.raises(UserError, match="no model"):
        start_and_watch(supervisor, [make_spec("trainer", mistake)])
    assert not said


def test_an_engine_that_died_with_the_trainer_is_what_is_reported(make_spec) -> None:
    """The engine ends right after the end of the trainer was seen."""

    def kill_engine() -> None:
        if not psutil.pid_exists(supervisor.pids["trainer"]):
            engine = psutil.Process(supervisor.pids["engine"])
            engine.kill()
            while engine.status() != psutil.STATUS_ZOMBIE:
                time.sleep(0.01)

    restarts, said = restarts_at(Progress(0, 0))
    specs = [
        make_spec("trainer", "import os; os.kill(os.getpid(), 9)"),
        make_spec("engine", "import time; time.sleep(600)"),
    ]
    with (
        Supervisor(StopRequest(), on_tick=kill_engine, restarts=restarts) as supervisor,
        pytest.raises(ProcessDied, match="engine died"),
    ):
        start_and_watch(supervisor, specs)
    assert not said


def test_a_single_trainer_needs_no_port(make_spec) -> None:
    (spec,) = with_rendezvous([make_spec("trainer", "pass")])
    assert "MASTER_PORT" not in spec.env or spec.env["MASTER_PORT"] == os.environ.get("MASTER_PORT")


def test_every_rank_is_asked_once_to_stop(make_spec, tmp_path: Path) -> None:
    code = """
import signal, sys, time
signals = []
signal.signal(signal.SIGTERM, lambda *_: signals.append(1))
print("ready", flush=True)
while not signals: time.sleep(0.01)
time.sleep(0.5)
print("asked", len(signals), flush=True)
"""
    specs = rank_specs(make_spec, code, code)
    with Supervisor(StopRequest()) as supervisor:
        supervisor.start(specs)
        supervisor.wait(lambda: all("ready" in spec.log_path.read_text() for spec in specs))
    assert [spec.log_path.read_text().split()[-2:] for spec in specs] == [["asked", "1"]] * 2


# ---- processes that are no trainers

ENV_KILLED = RankEnd("env", -9, "", "exit code -9, ended by SIGKILL")


def replacements_at(
    *progress: Progress, max_restarts: int = 3, has_published: Callable[[], bool] = lambda: True
) -> tuple[Replacements, list[tuple[str, str]]]:
    said: list[tuple[str, str]] = []
    now = iter((Progress(0, 0), *progress)).__next__  # the first one: when the session began
    return Replacements(max_restarts, now, lambda *note: said.append(note), has_published), said


def test_each_process_has_its_own_restarts_and_needs_a_further_step() -> None:
    replacements, said = replacements_at(*(Progress(step, 0) for step in (1, 1, 1, 2, 3)), max_restarts=2)
    assert replacements.refusal([ENV_KILLED]) == ""
    engine = RankEnd("engine", 1, "", "exit code 1")
    assert replacements.refusal([engine]) == ""
    assert replacements.refusal([ENV_KILLED]) == "env ended after 1 restart, before a further step was taken"
    assert replacements.refusal([ENV_KILLED]) == ""
    assert replacements.refusal([ENV_KILLED]) == "env ended again after 2 restarts (--max-restarts 2)"
    assert said[0] == (
        "env", "env died after step 1: exit code -9, ended by SIGKILL; it starts again (restart 1 of 2)"
    )  # fmt: skip
    assert [name for name, _ in said] == ["env", "engine", "env"]


def test_an_error_with_a_remedy_is_no_reason_for_a_restart() -> None:
    refused = RankEnd("env", 2, "there is no task 'digit'")
    assert replacements_at(Progress(1, 0))[0].refusal([refused]) == "a new start would end in the same way"


def test_an_exception_before_the_first_step_is_no_reason_for_a_restart() -> None:
    raised = RankEnd("env", 1, "", "exit code 1")
    replacements, _ = replacements_at(Progress(0, 0), Progress(0, 0), Progress(1, 0))
    assert replacements.refusal([raised]) == "env ended after 0 restarts, before a further step was taken"
    assert replacements.refusal([ENV_KILLED]) == ""
    assert replacements.refusal([raised]) == ""
    assert replacements_at(Progress(1, 0), max_restarts=0)[0].refusal([ENV_KILLED]) == "--max-restarts is 0"


MORTAL = """
import os, pathlib, signal, threading, time
lives, die = pathlib.Path({lives!r}), pathlib.Path({die!r})
with lives.open("a") as file: file.write({name!r} + "\\n")
def end_once():
    while not die.exists(): time.sleep(0.02)
    die.unlink()
    os.kill(os.getpid(), signal.SIGKILL)
threading.Thread(target=end_once, daemon=True).start()
{rest}
"""


@pytest.mark.parametrize(
    ("victim", "again"), [("env", ["env"]), ("engine", ["engine", "trainer", "env"])], ids=["environment", "engine"]
)
def test_callers_restart_with_an_engine_but_not_with_an_environment(
    make_spec, server_code, tmp_path: Path, victim: str, again: list[str]
) -> None:
    lives, port = tmp_path / "lives", free_port()

    def spec(name: str, rest: str, url: str | None = None) -> ProcessSpec:
        die = tmp_path / ("die" if name == victim else "never")
        return make_spec(name, MORTAL.format(lives=str(lives), die=str(die), name=name, rest=rest), ready_url=url)

    replacements, said = replacements_at(Progress(3, 2), has_published=lambda: lives.read_text().count("trainer") == 2)
    with Supervisor(StopRequest(), replacements=replacements) as supervisor:
        supervisor.start([spec("engine", server_code(port), f"http://127.0.0.1:{port}/health")])
        for name in ("trainer", "env"):
            supervisor.start([spec(name, "time.sleep(60)")])
            supervisor.wait(lambda name=name: name in lives.read_text())
        (tmp_path / "die").touch()
        deadline = time.monotonic() + 60
        supervisor.wait(lambda: len(lives.read_text().split()) == 3 + len(again) or time.monotonic() > deadline)
    assert lives.read_text().split()[3:] == again
    assert [name for name, _ in said] == [victim]


def test_flags_of_the_first_start_are_left_out_after_a_process_was_ready(make_spec, server_code, tmp_path) -> None:
    lives, die, port = tmp_path / "lives", tmp_path / "die", free_port()
    rest = f"import sys\nwith lives.open('a') as file: file.write(str(sys.argv[1:]) + '\\n')\n{server_code(port)}"
    code = MORTAL.format(lives=str(lives), die=str(die), name="", rest=rest)
    hub = make_spec("hub", code, ready_url=f"http://127.0.0.1:{port}/healthz")
    hub = replace(hub, argv=(*hub.argv, "--fresh", "true"), first_flags=("--fresh", "true"))
    die.touch()  # it is killed before it is ready: what the flags ask for may not have been done
    replacements, _ = replacements_at(Progress(1, 0), Progress(2, 0))
    with Supervisor(StopRequest(), replacements=replacements) as supervisor:
        supervisor.start([hub])
        deadline = time.monotonic() + 30
        die.touch()
        supervisor.wait(lambda: lives.read_text().count("[]") or time.monotonic() > deadline)
    assert lives.read_text().split("\n")[-2] == "[]"
    assert "['--fresh', 'true']" in lives.read_text()
