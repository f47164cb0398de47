"""The supervisor with real processes: readiness, death, order of stopping, no orphans."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from tests.e2e.processes import free_port
from treadle.errors import ProcessDied, UserError
from treadle.launch.process_spec import ProcessSpec
from treadle.launch.restarts import EngineRestarts, Progress, Replacements, TrainerRestarts
from treadle.launch.supervisor import STOP_ORDER, Stopped, StopRequest, Supervisor
from treadle.net.probe import answers_ok

SLEEP = "import time; time.sleep(60)"
# Writes when it was asked to stop, then ends well: what the trainer does with its checkpoint.
ORDERLY = """
import pathlib, signal, sys, time
def end(*_):
    with pathlib.Path({file!r}).open("a") as file:
        file.write({name!r} + "\\n")
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
print("listening", flush=True)
time.sleep(60)
"""
STUBBORN = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("deaf", flush=True)
time.sleep(60)
"""


def start_and_watch(supervisor: Supervisor, *specs: ProcessSpec, is_trained: bool = True) -> None:
    supervisor.start(specs)
    supervisor.watch(lambda: is_trained)


def wait_for(condition: Callable[[], bool], what: str, seconds: float = 15.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"no {what} within {seconds} s"
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def test_start_returns_when_the_server_answers(make_spec, server_code) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}/healthz"
    with Supervisor(StopRequest()) as supervisor:
        supervisor.start([make_spec("hub", server_code(port), ready_url=url)])
        pid = supervisor.pids["hub"]
        assert is_running(pid)
    assert not is_running(pid)


def test_a_process_that_does_not_start_is_named_with_code_and_tail(make_spec) -> None:
    code = "import sys\nfor i in range(30): print('line', i)\nsys.exit(3)"
    spec = make_spec("engine", code, ready_url="http://127.0.0.1:9/health")
    with Supervisor(StopRequest()) as supervisor, pytest.raises(ProcessDied) as caught:
        supervisor.start([spec])
    text = str(caught.value)
    assert "engine died (exit code 3)" in text
    assert "| line 29" in text
    assert "| line 10\n" in text
    assert "line 9\n" not in text, "only the last twenty lines"
    assert str(spec.log_path) in text


def test_a_process_that_is_never_ready_is_given_up_at_its_deadline(make_spec) -> None:
    spec = make_spec("engine", SLEEP, ready_url="http://127.0.0.1:9/health", ready_timeout_s=0.5)
    with (
        Supervisor(StopRequest()) as supervisor,
        pytest.raises(ProcessDied, match="engine was not ready after"),
    ):
        supervisor.start([spec])


def test_a_users_mistake_in_a_child_becomes_the_launchers_own_sentence(make_spec) -> None:
    code = (
        "import sys\nprint('loading')\n"
        "sys.stderr.write('treadle: there is no model smol\\n  -> check --model\\n')\nsys.exit(2)"
    )
    with Supervisor(StopRequest()) as supervisor, pytest.raises(UserError) as caught:
        supervisor.start([make_spec("engine", code, ready_url="http://127.0.0.1:9/health")])
    assert caught.value.exit_code == 2
    assert (caught.value.message, caught.value.fix) == ("there is no model smol", "check --model")


def test_the_tail_has_no_lines_of_an_earlier_start(make_spec) -> None:
    spec = make_spec("env", "import sys; print('second life'); sys.exit(1)")
    spec.log_path.parent.mkdir(parents=True)
    spec.log_path.write_text("first life\n")
    with Supervisor(StopRequest()) as supervisor, pytest.raises(ProcessDied) as caught:
        start_and_watch(supervisor, spec)
    assert "second life" in str(caught.value)
    assert "first life" not in str(caught.value)
    assert spec.log_path.read_text().startswith("first life"), "logs are appended to"


def test_the_run_is_complete_when_every_worker_ended_well(make_spec, server_code) -> None:
    port = free_port()
    with Supervisor(StopRequest()) as supervisor:
        supervisor.start([make_spec("hub", server_code(port), ready_url=f"http://127.0.0.1:{port}/")])
        supervisor.start([make_spec("env", "pass"), make_spec("trainer", "pass")])
        supervisor.watch()
        hub = supervisor.pids["hub"]
        assert is_running(hub)
    assert not is_running(hub)


@pytest.mark.parametrize(("code", "says"), [(0, "ended before its last step"), (5, r"trainer died \(exit code 5\)")])
def test_a_trainer_that_ends_too_early_takes_the_run_down(make_spec, code: int, says: str) -> None:
    with Supervisor(StopRequest()) as supervisor:
        supervisor.start([make_spec("env", SLEEP)])
        env = supervisor.pids["env"]
        with pytest.raises(ProcessDied, match=says):
            start_and_watch(supervisor, make_spec("trainer", f"import sys; sys.exit({code})"), is_trained=False)
    assert not is_running(env)


def test_a_server_may_not_end_by_itself(make_spec, server_code) -> None:
    port = free_port()
    code = server_code(port).replace("serve_forever()", "handle_request()")
    with Supervisor(StopRequest()) as supervisor:
        supervisor.start([make_spec("hub", code, ready_url=f"http://127.0.0.1:{port}/")])
        with pytest.raises(ProcessDied, match=r"hub ended before its time \(exit code 0\)"):
            start_and_watch(supervisor, make_spec("env", SLEEP))


def test_an_environment_that_leaves_the_trainer_waiting_ends_the_run(make_spec) -> None:
    with Supervisor(StopRequest(), grace_s=0.3) as supervisor:
        supervisor.start([make_spec("env", "pass"), make_spec("trainer", SLEEP)])
        with pytest.raises(ProcessDied, match="env ended while the trainer still needed it"):
            supervisor.watch()


def test_stopping_asks_trainer_and_env_then_engine_then_hub(make_spec, tmp_path: Path) -> None:
    order = tmp_path / "order.txt"
    names = ["hub", "engine", "env", "trainer"]
    specs = [make_spec(name, ORDERLY.format(file=str(order), name=name)) for name in names]
    limits = [(kind, 60.0) for kind, _ in STOP_ORDER]
    with Supervisor(StopRequest(), stop_order=limits) as supervisor:
        supervisor.start(specs)
        for spec in specs:
            wait_for(lambda spec=spec: "listening" in spec.log_path.read_text(), spec.name)
        begun = time.monotonic()
    assert time.monotonic() - begun < 50
    ended = order.read_text().split()
    assert sorted(ended[:2]) == ["env", "trainer"]
    assert ended[2:] == ["engine", "hub"]


def test_whoever_does_not_listen_is_killed_in_time(make_spec) -> None:
    deadlines = (("trainer", 0.4), ("env", 0.6))
    specs = [make_spec("trainer", STUBBORN), make_spec("env", STUBBORN)]
    with Supervisor(StopRequest(), stop_order=deadlines) as supervisor:
        supervisor.start(specs)
        for spec in specs:
            wait_for(lambda spec=spec: "deaf" in spec.log_path.read_text(), spec.name)
        pids = list(supervisor.pids.values())
        begun = time.monotonic()
    assert time.monotonic() - begun < 15
    assert not any(is_running(pid) for pid in pids)


def test_a_stop_waits_only_for_a_trainer_that_saves_and_says_so(make_spec, tmp_path: Path) -> None:
    limits = dict(STOP_ORDER)
    assert limits.pop("trainer") >= 60, "a large checkpoint on a slow disk"
    assert sum(limits.values()) < 4
    saving = (
        "import pathlib, signal, sys, time\n"
        f"def save(*_): time.sleep(1); pathlib.Path({str(tmp_path / 'saved')!r}).write_text('whole'); sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, save)\nprint('up', flush=True)\ntime.sleep(60)\n"
    )
    lines: list[str] = []
    with Supervisor(StopRequest(), on_wait=lines.append, say_every_s=0.3) as supervisor:
        spec = make_spec("trainer", saving)
        supervisor.start([spec])
        wait_for(lambda: "up" in spec.log_path.read_text(), "the handler")
    assert (tmp_path / "saved").read_text() == "whole"
    assert lines[0].startswith("waiting for the trainer to end")


def test_the_first_ctrl_c_stops_and_the_second_kills_at_once(make_spec) -> None:
    stop = StopRequest()
    spec = make_spec("trainer", STUBBORN)
    with stop.listening(), Supervisor(stop) as supervisor:
        supervisor.start([spec])
        wait_for(lambda: "deaf" in spec.log_path.read_text(), "trainer")
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(Stopped):
            supervisor.watch()
        before = signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGINT))
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        begun = time.monotonic()
        supervisor.shut_down()
        took = time.monotonic() - begun
        signal.signal(signal.SIGALRM, before)
    assert took < 15
    assert stop.count == 2


def test_what_a_child_started_ends_with_it(make_spec, tmp_path: Path) -> None:
    file = tmp_path / "grandchild"
    code = (
        "import pathlib, subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        f"pathlib.Path({str(file)!r}).write_text(str(child.pid))\nsys.exit(1)\n"
    )
    with Supervisor(StopRequest()) as supervisor, pytest.raises(ProcessDied):
        start_and_watch(supervisor, make_spec("env", code))
    wait_for(lambda: not is_running(int(file.read_text())), "end of the grandchild")


LAUNCHER = """
import sys
from pathlib import Path
from treadle.launch.machine import MachineFacts
from treadle.launch.process_spec import ProcessSpec, child_environment
from treadle.launch.supervisor import StopRequest, Supervisor
import os
environment = child_environment(MachineFacts(1, False, launcher_pid=os.getpid(), environment=os.environ), threads=1, is_offline=True)
folder = Path(sys.argv[1])
child = "from treadle.background import end_with_parent; end_with_parent(); import time; print('up', flush=True); time.sleep(60)"
specs = [ProcessSpec(name, (sys.executable, "-c", child), environment, folder / (name + ".log")) for name in ("env", "trainer")]
supervisor = Supervisor(StopRequest())
supervisor.start(specs)
print(*supervisor.pids.values(), flush=True)
supervisor.watch()
"""  # noqa: E501


def test_no_orphan_is_left_when_the_launcher_is_killed(tmp_path: Path) -> None:
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCHER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert launcher.stdout is not None
    try:
        pids = [int(word) for word in launcher.stdout.readline().split()]
        assert len(pids) == 2
        for name in ("env", "trainer"):
            wait_for(lambda name=name: "up" in (tmp_path / f"{name}.log").read_text(), name)
    finally:
        launcher.kill()
        launcher.wait()
        launcher.stdout.close()
    wait_for(lambda: not any(is_running(pid) for pid in pids), "end of the orphans", seconds=8)


def test_an_engine_of_a_fleet_that_dies_starts_again(make_spec, server_code) -> None:
    ports = free_port(), free_port()
    specs = [
        make_spec(name, server_code(port), ready_url=f"http://127.0.0.1:{port}/healthz")
        for name, port in zip(("engine", "engine-1"), ports, strict=True)
    ]
    said: list[str] = []
    restarts = EngineRestarts(said.append, has_loaded=lambda *_: True)
    with Supervisor(StopRequest(), engine_restarts=restarts) as supervisor:
        supervisor.start(specs)
        before = supervisor.pids["engine-1"]
        os.kill(before, signal.SIGKILL)
        supervisor.wait(lambda: supervisor.pids["engine-1"] != before)
        wait_for(lambda: answers_ok(specs[1].ready_url or ""), "answer of the new engine")
    assert len(said) == 1
    assert "engine-1 ended (exit code -9" in said[0]


def test_an_engine_whose_port_was_taken_starts_again_at_another(make_spec, server_code) -> None:
    code = server_code(0).replace("('127.0.0.1', 0)", "('127.0.0.1', int(sys.argv[-1]))")
    port = free_port()
    spec = make_spec("engine-1", f"import sys\n{code}", ready_url=f"http://127.0.0.1:{port}/healthz")
    spec = replace(spec, argv=(*spec.argv, "--port", str(port)), may_move=True)
    said: list[str] = []
    restarts = EngineRestarts(said.append, has_loaded=lambda *_: True)
    with Supervisor(StopRequest(), engine_restarts=restarts) as supervisor, socket.socket() as other:
        supervisor.start([spec])
        before = supervisor.pids["engine-1"]
        os.kill(before, signal.SIGKILL)
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        wait_for(lambda: is_taken(other, port), "the port of the killed engine")
        supervisor.wait(lambda: supervisor.pids["engine-1"] != before)
        assert f"port {port} of engine-1 is in use by another program" in said[-1]
        url = f"http://127.0.0.1:{said[-1].rpartition(' ')[2]}/healthz"
        wait_for(lambda: answers_ok(url), "answer of the new engine")


def is_taken(listener: socket.socket, port: int) -> bool:
    """Whether `listener` now listens there."""
    try:
        listener.bind(("127.0.0.1", port))
    except OSError:
        return False
    listener.listen()
    return True


def test_the_death_of_an_engine_ends_a_run_with_one_engine(make_spec, server_code) -> None:
    port = free_port()
    spec = make_spec("engine", server_code(port), ready_url=f"http://127.0.0.1:{port}/healthz")
    with Supervisor(StopRequest()) as supervisor:
        supervisor.start([spec])
        os.kill(supervisor.pids["engine"], signal.SIGKILL)
        with pytest.raises(ProcessDied, match="engine died"):
            supervisor.wait(lambda: False)


def test_an_engine_that_never_loads_again_is_given_up(make_spec, server_code, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr("treadle.launch.restarts.LONGEST_PAUSE_S", 0.0)
    port, mark = free_port(), str(tmp_path / "mark")
    once = f"import os, sys\nif os.path.exists({mark!r}): sys.exit(3)\nopen({mark!r}, 'w').close()\n"
    spec = make_spec("engine", once + server_code(port), ready_url=f"http://127.0.0.1:{port}/healthz")
    said: list[str] = []
    restarts = EngineRestarts(said.append, has_loaded=lambda *_: False)
    with Supervisor(StopRequest(), engine_restarts=restarts) as supervisor:
        supervisor.start([spec])
        os.kill(supervisor.pids["engine"], signal.SIGKILL)
        with pytest.raises(ProcessDied, match=r"engine died \(exit code 3\)"):
            supervisor.wait(lambda: False)
    assert "ended 6 times in a row before it had loaded" in said[-1]


def fleet_specs(make_spec, server_code, code_of_second: str) -> list[ProcessSpec]:
    """Two engines; {serve} in the code of the second one is its server."""
    first, second = free_port(), free_port()
    codes = {first: server_code(first), second: code_of_second.replace("{serve}", server_code(second))}
    names = ("engine", "engine-1")
    return [
        make_spec(name, code, ready_url=f"http://127.0.0.1:{port}/healthz")
        for name, (port, code) in zip(names, codes.items(), strict=True)
    ]


def test_an_engine_that_is_killed_while_it_loads_first_starts_again(make_spec, server_code, tmp_path: Path) -> None:
    mark = str(tmp_path / "mark")
    code = (
        f"import os\nif not os.path.exists({mark!r}):\n open({mark!r}, 'w').close(); os.kill(os.getpid(), 9)\n{{serve}}"
    )
    specs = fleet_specs(make_spec, server_code, code)
    said: list[str] = []
    restarts = EngineRestarts(said.append, has_loaded=lambda *_: False)
    replacements = Replacements(3, lambda: Progress(1, 0), lambda *_: None, lambda: True)
    with Supervisor(StopRequest(), engine_restarts=restarts, replacements=replacements) as supervisor:
        supervisor.start(specs)
        supervisor.wait(lambda: answers_ok(specs[1].ready_url or ""))
    assert len(said) == 1
    assert "engine-1 ended (exit code -9" in said[0]


def test_a_fleet_is_started_when_one_of_its_engines_is_ready(make_spec, server_code) -> None:
    specs = fleet_specs(make_spec, server_code, SLEEP)
    restarts = EngineRestarts(lambda _: None, has_loaded=lambda *_: False)
    with Supervisor(StopRequest(), engine_restarts=restarts) as supervisor:
        supervisor.start(specs)
        assert answers_ok(specs[0].ready_url or "")
        assert is_running(supervisor.pids["engine-1"])


def test_a_fleet_whose_settings_are_refused_ends_at_once(make_spec, server_code) -> None:
    mistake = "import sys; sys.stderr.write('treadle: no model\\n  -> --model\\n'); sys.exit(2)"
    specs = fleet_specs(make_spec, lambda _: SLEEP, mistake)
    said: list[str] = []
    restarts = EngineRestarts(said.append, has_loaded=lambda *_: False)
    with Supervisor(StopRequest(), engine_restarts=restarts) as supervisor, pytest.raises(UserError, match="no model"):
        supervisor.start(specs)
    assert not said


@pytest.mark.parametrize("has_joined", [True, False])
def test_a_run_that_has_given_up_its_engines_needs_others(make_spec, monkeypatch, has_joined: bool) -> None:
    monkeypatch.setattr("treadle.launch.restarts.LONGEST_PAUSE_S", 0.0)
    specs = [make_spec(name, "raise SystemExit(3)", ready_url="http://127.0.0.1:9/") for name in ("engine", "engine-1")]
    said: list[str] = []
    replaced: list[tuple[str, str]] = []
    restarts = EngineRestarts(said.append, has_loaded=lambda *_: False, has_joined=lambda: has_joined)
    replacements = Replacements(3, lambda: Progress(1, 0), lambda *note: replaced.append(note), lambda: True)
    with Supervisor(StopRequest(), engine_restarts=restarts, replacements=replacements) as supervisor:
        if has_joined:
            supervisor.start(specs)
            supervisor.start([make_spec("trainer", "pass")])
            supervisor.watch()
        else:
            with pytest.raises(ProcessDied, match=r"engine(-1)? died \(exit code 3\), and no other engine serves"):
                supervisor.start(specs)
    assert sum("it is not started again" in line for line in said) == 2
    assert not replaced


def test_the_trainer_starts_again_beside_an_engine_that_was_given_up(
    make_spec, server_code, monkeypatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("treadle.launch.restarts.LONGEST_PAUSE_S", 0.0)
    said: list[str] = []
    engines = EngineRestarts(said.append, has_loaded=lambda *_: False)
    ranks = TrainerRestarts(3, lambda: Progress(1, 0), said.append)
    replacements = Replacements(3, lambda: Progress(1, 0), lambda *_: None, lambda: True)
    mark = str(tmp_path / "mark")
    crash = f"import os\nif not os.path.exists({mark!r}):\n open({mark!r}, 'w').close(); os.kill(os.getpid(), 9)\n"
    with Supervisor(StopRequest(), restarts=ranks, engine_restarts=engines, replacements=replacements) as supervisor:
        supervisor.start(fleet_specs(make_spec, server_code, "raise SystemExit(3)"))
        supervisor.wait(lambda: any("it is not started again" in line for line in said))
        start_and_watch(supervisor, make_spec("trainer", crash))
    assert "the trainer starts again" in said[-1]
