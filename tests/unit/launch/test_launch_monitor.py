"""The launcher's monitor: waits, stacks of silent processes, and the end of a run without progress."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import msgspec
import pytest

from tests.e2e.processes import free_port
from treadle.errors import RunStalled
from treadle.launch.monitor import RATE_WINDOW_S, RunMonitor
from treadle.watch.stacks import SIGNAL
from treadle.wire.hub import LastReport, Processes, ProcessReport, WaitReport

BATCH = WaitReport(what="the batch of step 3", seconds=41.6, of="env")


OVERSEER = """
import os, sys, pathlib, time
from treadle.launch.monitor import RunMonitor
monitor = RunMonitor(sys.argv[1], dict, pathlib.Path("."), stall_s=3.0)
monitor.poll(1)
print("looks", flush=True)
while not os.path.exists(sys.argv[2]):
    time.sleep(0.05)
monitor.poll(1)
"""


class FakeClock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class HubDouble:
    """Answers GET /v1/processes with what it is given."""

    def __init__(self) -> None:
        self.standings: list[LastReport] = []
        self.status = 200
        double = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(double.status)
                self.end_headers()
                board = msgspec.json.encode(Processes(processes=double.standings))
                self.wfile.write(board if double.status == 200 else b'{"detail": "a token is needed"}')

            def log_message(self, *_: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def report(self, kind: str = "trainer", heard_s: float = 0.0, **more: object) -> None:
        report = ProcessReport(**{"kind": kind, "name": kind, "machine": "m", "pid": 7, **more})  # type: ignore[arg-type]
        self.standings = [*(s for s in self.standings if s.report.kind != kind)]
        self.standings.append(LastReport(report=report, heard_s=heard_s))

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def hub() -> Iterator[HubDouble]:
    double = HubDouble()
    yield double
    double.close()


def monitor_of(url: str, clock: FakeClock, pids: dict[str, int] | None = None, stall_s: float = 0.0) -> RunMonitor:
    return RunMonitor(url, lambda: pids or {}, Path("runs/x/logs"), stall_s, clock)


def test_a_normal_wait_is_named_in_a_few_words_and_gone_when_it_is_over(hub: HubDouble) -> None:
    clock = FakeClock()
    monitor = monitor_of(hub.url, clock)
    hub.report(waits=[BATCH])
    hub.report("env", waits=[WaitReport(what="the trainer's next step", seconds=1.0)])
    monitor.poll(0)
    assert (monitor.status.now, monitor.status.notes) == ("waiting for the batch of step 3", ())
    hub.report()
    clock.now_s = 1.0
    monitor.poll(0)
    assert (monitor.status.now, monitor.status.notes) == ("", ())
    assert monitor.status.alarms == ()


def test_a_wait_past_half_of_its_deadline_is_explained(hub: HubDouble) -> None:
    clock = FakeClock()
    monitor = monitor_of(hub.url, clock)
    adoption = WaitReport(
        what="version 9", seconds=60.0, of="engine", holding="step 9", fix="see its log", deadline_s=100
    )
    hub.report(waits=[adoption])
    hub.report("env", heard_s=20.0)
    monitor.poll(0)
    assert monitor.status.notes == (
        "trainer has waited 60 s for version 9 (it holds step 9) (see its log)",
        "env has not reported for 20 s (pid 7)",
    )
    assert monitor.status.alarms == ()


def test_a_late_wait_is_an_alarm_once_with_the_logs_that_have_the_stacks(hub: HubDouble) -> None:
    clock = FakeClock()
    monitor = monitor_of(hub.url, clock)
    for seconds in (300.0, 301.0):
        hub.report(waits=[WaitReport(what="version 9", seconds=seconds, of="engine", is_late=True, fix="see its log")])
        monitor.poll(0)
        clock.now_s += 1
    found = "trainer has waited 300 s for version 9; stacks are in runs/x/logs/trainer.log and runs/x/logs/engine.log"
    assert monitor.status.alarms == (f"{found}; see its log",)


def test_each_of_several_environments_is_known_by_its_own_log(hub: HubDouble) -> None:
    clock = FakeClock()
    monitor = monitor_of(hub.url, clock, {"trainer": 1, "env-gsm8k": 2, "env-echo": 3})
    late = WaitReport(what="step 3", seconds=700.0, of="trainer", is_late=True)
    hub.report(kind="env", name="env echo", pid=3, waits=[late])
    monitor.poll(0)
    assert "stacks are in runs/x/logs/env-echo.log and runs/x/logs/trainer.log" in monitor.status.alarms[0]
    hub.report(pid=1, waits=[WaitReport(what="batch 3", seconds=1000.0, of="env", is_late=True)])
    clock.now_s += 1
    monitor.poll(0)
    logs = " and ".join(f"runs/x/logs/{name}.log" for name in ("trainer", "env-gsm8k", "env-echo"))
    assert f"stacks are in {logs}" in monitor.status.alarms[1]


def test_what_is_wrong_with_the_groups_of_an_environment_is_found_once(hub: HubDouble) -> None:
    clock = FakeClock()
    monitor = monitor_of(hub.url, clock)
    for count in (10, 11, 12):
        hub.report("env", problem=f"dropped {count} of its last {count} groups", fix="easier items")
        monitor.poll(0)
        clock.now_s += 1
    assert monitor.status.findings == ("env dropped 10 of its last 10 groups; easier items",)
    assert monitor.status.alarms == (), "nobody waits in vain"


def test_a_hub_that_does_not_answer_writes_its_stacks_once(tmp_path: Path) -> None:
    log = tmp_path / "stacks"
    code = f"import faulthandler, sys, time\nfaulthandler.register({int(SIGNAL)}, file=open({str(log)!r}, 'w'))\n"
    stuck = subprocess.Popen(
        [sys.executable, "-c", f"{code}print('up', flush=True)\ntime.sleep(60)"], stdout=subprocess.PIPE
    )
    assert stuck.stdout is not None
    stuck.stdout.readline()
    clock = FakeClock()
    monitor = monitor_of(f"http://127.0.0.1:{free_port()}", clock, {"hub": stuck.pid})
    for clock.now_s in (0, 29, 31, 33):
        monitor.poll(0)
    (alarm,) = monitor.status.alarms
    assert alarm.startswith(f"hub (pid {stuck.pid}) has not reported for 31 s; its stacks are in runs/x/logs/hub")
    deadline = time.monotonic() + 10
    while "most recent call first" not in log.read_text() and time.monotonic() < deadline:
        time.sleep(0.02)
    stuck.send_signal(signal.SIGTERM)
    stuck.communicate()
    assert log.read_text().count("most recent call first") == 1


def test_a_run_without_progress_is_stopped_with_a_list_of_waits(hub: HubDouble) -> None:
    clock = FakeClock()
    monitor = monitor_of(hub.url, clock, stall_s=100.0)
    hub.report(waits=[BATCH], counts={"steps": 2.0})
    hub.report("env", counts={"groups_finished": 5.0})
    monitor.poll(0)
    clock.now_s = 90
    hub.report("env", counts={"groups_finished": 6.0})
    monitor.poll(0)  # a group came
    clock.now_s = 180
    monitor.poll(1)  # a step was taken
    clock.now_s = 270
    monitor.poll(1)
    clock.now_s = 281
    with pytest.raises(
        RunStalled, match="nothing has moved for 101 s: trainer has waited 42 s for the batch of step 3"
    ):
        monitor.poll(1)


def test_a_slow_start_is_no_standstill(hub: HubDouble) -> None:
    clock = FakeClock()
    monitor = monitor_of(hub.url, clock, stall_s=100.0)
    hub.report("engine")
    for clock.now_s in (0, 90, 300):
        monitor.poll(0, is_starting=True)
    clock.now_s = 310
    monitor.poll(0)
    clock.now_s = 411
    with pytest.raises(RunStalled, match="nothing has moved for 101 s"):
        monitor.poll(0)


def test_zero_never_stops_a_run(hub: HubDouble) -> None:
    clock = FakeClock()
    monitor = monitor_of(hub.url, clock)
    for clock.now_s in (0, 1e6):
        monitor.poll(0)


def test_a_hub_that_requires_a_token_does_not_stop_the_run(hub: HubDouble) -> None:
    clock = FakeClock()
    monitor = monitor_of(hub.url, clock, {"hub": 1}, stall_s=100.0)
    hub.status = 401
    for clock.now_s in (0, 50, 200, 400):
        monitor.poll(0)
    assert monitor.status.alarms == ()


def test_a_hang_that_comes_back_is_reported_again(hub: HubDouble) -> None:
    clock = FakeClock()
    monitor = monitor_of(hub.url, clock)
    late = WaitReport(what="version 9", seconds=300.0, of="engine", is_late=True)
    for waits in ([late], [], [late]):
        hub.report(waits=waits)
        monitor.poll(0)
        clock.now_s += 1
    assert len(monitor.status.alarms) == 2


def test_the_advice_of_a_process_names_the_flags_of_the_run(hub: HubDouble) -> None:
    monitor = monitor_of(hub.url, FakeClock())
    late = WaitReport(what="version 3", seconds=90.0, deadline_s=60.0, is_late=True, fix="--publish-timeout-s ends it")
    hub.report(waits=[late], problem="clips much", fix="lower --lr")
    monitor.poll(0)
    assert monitor.status.alarms[0].endswith("; --train.publish-timeout-s ends it")
    assert monitor.status.findings == ("trainer clips much; lower --train.lr",)


def test_a_launcher_that_was_stopped_does_not_take_the_run_for_stalled(tmp_path: Path) -> None:
    """Ctrl-Z and fg: nothing could move meanwhile, and nothing is wrong."""
    words = [sys.executable, "-c", OVERSEER, f"http://127.0.0.1:{free_port()}", str(tmp_path / "go on")]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        assert launcher.stdout.readline() == "looks\n"
        launcher.send_signal(signal.SIGSTOP)
        time.sleep(3.5)
        launcher.send_signal(signal.SIGCONT)
        (tmp_path / "go on").touch()
        assert launcher.wait(60) == 0


def test_the_token_rate_covers_all_engines_over_the_last_seconds(hub: HubDouble) -> None:
    clock = FakeClock()
    monitor = RunMonitor(hub.url, dict, Path("logs"), stall_s=0.0, clock=clock)

    def rate(now_s: float, num_tokens: float) -> float | None:
        clock.now_s = now_s
        hub.report("engine", counts={"generated_tokens": num_tokens})
        monitor.poll(None)
        return monitor.status.generated_tok_s

    assert rate(1.0, 1000.0) is None
    assert rate(3.0, 1400.0) == pytest.approx(200.0)
    assert rate(3.0 + RATE_WINDOW_S, 1400.0) == 0.0, "what was long ago does not count"
    assert rate(4.0 + RATE_WINDOW_S, 100.0) is None, "an engine that was started again counts from 0"
    assert rate(5.0 + RATE_WINDOW_S, 400.0) == pytest.approx(300.0)
