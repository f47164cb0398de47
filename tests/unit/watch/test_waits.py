"""Long waits are logged at growing intervals; overdue waits are logged once, with the stacks."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import msgspec
import pytest

from treadle.watch.waits import Waits, WaitSpec
from treadle.watch.watchdog import ProcessFacts, Watchdog, report_of
from treadle.wire.hub import ProcessReport

HUB = WaitSpec("the hub at http://127.0.0.1:8000", fix="start it with `treadle hub`", of="hub")


class FakeClock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class LoggedEvents(list[tuple[str, dict[str, object]]]):
    def events(self) -> list[str]:
        return [event for event, _ in self]


@pytest.fixture
def logged() -> LoggedEvents:
    records, handler = LoggedEvents(), logging.Handler()
    handler.emit = lambda record: records.append((record.getMessage(), record.treadle_fields))  # type: ignore[attr-defined,method-assign]
    logger = logging.getLogger("treadle.watchdog")
    logger.addHandler(handler)
    before = logger.level
    logger.setLevel("INFO")
    yield records
    logger.setLevel(before)
    logger.removeHandler(handler)


def test_a_long_wait_is_logged_at_growing_intervals_and_at_its_end(logged: LoggedEvents) -> None:
    clock = FakeClock()
    waits = Waits(clock)
    dog = Watchdog("env", "env gsm8k", waits)
    logged_at = []
    with waits.waiting(HUB):
        for _ in range(4 * 70):
            clock.now_s += 0.25
            before = len(logged)
            dog.check()
            logged_at += [clock.now_s] * (len(logged) - before)
    dog.check()
    assert logged_at == [2, 6, 14, 30, 62]
    event, fields = logged[-1]
    assert (event, fields["for"], fields["seconds"]) == ("waited", HUB.what, 70)
    assert logged[0][1]["fix"] == HUB.fix


def test_short_waits_and_normal_waits_are_not_logged(logged: LoggedEvents) -> None:
    clock = FakeClock()
    waits = Waits(clock)
    dog = Watchdog("env", "env gsm8k", waits)
    with waits.waiting(HUB):
        clock.now_s += 1.9
        dog.check()
    with waits.waiting(WaitSpec("the trainer's next step")):
        clock.now_s += 1000
        dog.check()
    dog.check()
    assert logged == []


def test_a_wait_that_was_given_up_is_not_logged_as_met(logged: LoggedEvents) -> None:
    clock = FakeClock()
    waits = Waits(clock)
    dog = Watchdog("env", "env gsm8k", waits)
    wait = waits.begin(HUB)
    clock.now_s += 3
    dog.check()
    waits.end(wait, was_met=False)
    dog.check()
    assert logged.events() == ["waiting"]


def test_an_overdue_wait_is_logged_once_with_stacks(logged: LoggedEvents, capfd) -> None:
    clock = FakeClock()
    waits = Waits(clock)
    dog = Watchdog("trainer", "trainer", waits)
    adoption = WaitSpec(
        "the engine to adopt version 17", fix="see engine.log", of="engine", holding="step 17", deadline_s=180
    )
    with waits.waiting(adoption) as wait:
        for seconds in (179, 181, 182):
            clock.now_s = seconds
            wait.problem = "no answer"
            dog.check()
    late = [fields for event, fields in logged if event == "late"]
    assert late == [
        {
            "for": "the engine to adopt version 17",
            "seconds": 181,
            "process": "engine",
            "holding": "step 17",
            "problem": "no answer",
            "fix": "see engine.log",
        }
    ]
    assert "test_an_overdue_wait" in capfd.readouterr().err, "the stack of this very thread"


def test_equal_waits_are_one_and_any_answer_resets_their_deadline(logged: LoggedEvents) -> None:
    clock = FakeClock()
    waits = Waits(clock)
    dog = Watchdog("env", "env gsm8k", waits)
    first, second, third = waits.begin(HUB), waits.begin(HUB), waits.begin(HUB)
    assert first is second is third
    clock.now_s = 5
    dog.check()
    waits.end(first, was_met=False)
    assert second.seconds == 5, "one gave up, the others still wait"
    waits.end(second, was_met=True)
    assert third.seconds == 0, "one was met, so the last one starts from 0"
    clock.now_s = 6.9
    dog.check()
    assert logged.events() == ["waiting"], "logged at 5 s, and not yet again"
    clock.now_s = 7.1
    dog.check()
    assert logged.events() == ["waiting", "waiting"]
    waits.end(third, was_met=True)
    assert waits.now == []


def test_the_longest_wait_stands_first() -> None:
    clock = FakeClock()
    waits = Waits(clock)
    old, new = WaitSpec("old"), WaitSpec("new")
    with waits.waiting(old):
        clock.now_s = 5
        with waits.waiting(new):
            clock.now_s = 6
            assert [wait.wanted.what for wait in waits.now] == ["old", "new"]
            assert waits.now[0].seconds == 6


def test_code_that_holds_the_event_loop_is_a_wait_of_its_own() -> None:
    waits = Waits()
    seen = threading.Event()

    async def hold_it() -> None:
        with Watchdog("env", "env", waits, loop=asyncio.get_running_loop()):
            await asyncio.sleep(0.6)
            deadline = time.monotonic() + 10
            while time.monotonic() < deadline and not seen.is_set():  # never awaits
                if any("event loop" in wait.wanted.what and wait.seconds > 0.6 for wait in waits.now):
                    seen.set()
                time.sleep(0.01)  # noqa: ASYNC251 - that is the point
            async with asyncio.timeout(30):
                while waits.now:  # until the watchdog sees that it moves again
                    await asyncio.sleep(0.01)

    asyncio.run(hold_it())
    assert seen.is_set()


STUCK = """
import asyncio, os, signal, sys, threading, time
from treadle.watch.stacks import include_tasks_of, listen_for_signal, write_stacks
def counting_sheep():
    time.sleep(60)
async def waiting_for_godot():
    await asyncio.sleep(60)
async def main():
    include_tasks_of(asyncio.get_running_loop())
    task = asyncio.create_task(waiting_for_godot())
    await asyncio.sleep(0)
    write_stacks("a test")
    os.kill(os.getpid(), signal.SIGUSR1)
    await asyncio.sleep(0.1)
    os._exit(7)
listen_for_signal()
threading.Thread(target=counting_sheep, daemon=True).start()
asyncio.run(main())
"""


def test_stacks_show_threads_and_coroutines_on_a_signal() -> None:
    done = subprocess.run([sys.executable, "-c", STUCK], capture_output=True, text=True, check=False, timeout=30)
    assert done.returncode == 7, done.stderr
    assert done.stderr.count("counting_sheep") == 2, "asked for by a call and by the signal"
    assert "waiting_for_godot" in done.stderr


class HubDouble:
    """Takes reports, or refuses them."""

    def __init__(self, status: int = 200) -> None:
        self.reports: list[dict[str, object]] = []
        double = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                double.reports.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                self.send_response(status)
                self.end_headers()
                self.wfile.write(b"{}")

            def log_message(self, *_: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def __enter__(self) -> HubDouble:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


def wait_for(condition, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_an_error_in_describe_is_logged_once_and_the_watchdog_continues(logged: LoggedEvents) -> None:
    looks = []

    def describe() -> ProcessFacts:
        looks.append(1)
        if len(looks) == 1:
            raise KeyError("counts")
        return ProcessFacts(state="well again")

    with HubDouble() as hub, Watchdog("env", "env", Waits(), hub.url, describe):
        wait_for(lambda: any(report["state"] == "well again" for report in hub.reports))
    assert logged.events().count("watchdog_failed") == 1
    assert hub.reports[-1]["state"] == "ended"


def test_a_refused_report_is_logged_once(logged: LoggedEvents) -> None:
    with HubDouble(status=422) as hub, Watchdog("env", "env", Waits(), hub.url):
        wait_for(lambda: len(hub.reports) >= 2)
    assert logged.events() == ["report_refused"]


def test_a_report_is_short_and_can_be_shown_anywhere() -> None:
    waits = Waits()
    with waits.waiting(WaitSpec("a\x1b[31m red\nline" + "x" * 1000)):
        report = report_of("env", "env \ud800", ProcessFacts(problem="y" * 1000), waits)
    assert len(report.waits[0].what) < 510
    assert report.waits[0].what.startswith("a [31m red line")
    assert len(report.problem) < 510
    assert msgspec.json.encode(report)


def test_a_report_names_the_deadline_of_a_wait_that_has_one() -> None:
    waits = Waits()
    with waits.waiting(WaitSpec("version 3", deadline_s=180)), waits.waiting(WaitSpec("a trainer")):
        report = report_of("env", "env", ProcessFacts(), waits)
    received = msgspec.json.decode(msgspec.json.encode(report), type=ProcessReport)
    assert {wait.what: wait.deadline_s for wait in received.waits} == {"version 3": 180, "a trainer": None}


def test_leaving_does_not_wait_for_a_hub_that_is_slow(monkeypatch) -> None:
    monkeypatch.setattr("treadle.watch.watchdog.SEND_TIMEOUT_S", 30.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        began = time.monotonic()
        with Watchdog("env", "env", Waits(), f"http://127.0.0.1:{silent.getsockname()[1]}"):
            time.sleep(0.1)
        assert time.monotonic() - began < 15.0
