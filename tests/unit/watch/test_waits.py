"""What takes long is said, ever more rarely; what takes too long is said once, with the stacks."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
import threading
import time

import pytest

from treadle.watch.waits import Waits, Wanted
from treadle.watch.watchdog import Watchdog

HUB = Wanted("the hub at http://127.0.0.1:8000", fix="start it with `treadle hub`", of="hub")


class FakeClock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Said(list[tuple[str, dict[str, object]]]):
    def events(self) -> list[str]:
        return [event for event, _ in self]


@pytest.fixture
def said() -> Said:
    records, handler = Said(), logging.Handler()
    handler.emit = lambda record: records.append((record.getMessage(), record.treadle_fields))  # type: ignore[attr-defined,method-assign]
    logger = logging.getLogger("treadle.watchdog")
    logger.addHandler(handler)
    before = logger.level
    logger.setLevel("INFO")
    yield records
    logger.setLevel(before)
    logger.removeHandler(handler)


def test_a_long_wait_is_told_ever_more_rarely_and_once_more_when_it_is_over(said: Said) -> None:
    clock = FakeClock()
    waits = Waits(clock)
    dog = Watchdog("env", "env gsm8k", waits)
    told_at = []
    with waits.waiting(HUB):
        for _ in range(4 * 70):
            clock.now_s += 0.25
            before = len(said)
            dog.look()
            told_at += [clock.now_s] * (len(said) - before)
    dog.look()
    assert told_at == [2, 6, 14, 30, 62]
    event, fields = said[-1]
    assert (event, fields["for"], fields["seconds"]) == ("waited", HUB.what, 70)
    assert said[0][1]["fix"] == HUB.fix


def test_a_short_wait_and_one_that_is_in_order_are_not_told(said: Said) -> None:
    clock = FakeClock()
    waits = Waits(clock)
    dog = Watchdog("env", "env gsm8k", waits)
    with waits.waiting(HUB):
        clock.now_s += 1.9
        dog.look()
    with waits.waiting(Wanted("the trainer's next step")):
        clock.now_s += 1000
        dog.look()
    dog.look()
    assert said == []


def test_a_wait_in_vain_is_not_told_as_met(said: Said) -> None:
    clock = FakeClock()
    waits = Waits(clock)
    dog = Watchdog("env", "env gsm8k", waits)
    wait = waits.begin(HUB)
    clock.now_s += 3
    dog.look()
    waits.end(wait, was_met=False)
    dog.look()
    assert said.events() == ["waiting"]


def test_a_wait_past_its_deadline_is_told_once_with_what_it_holds_and_the_stacks(said: Said, capfd) -> None:
    clock = FakeClock()
    waits = Waits(clock)
    dog = Watchdog("trainer", "trainer", waits)
    adoption = Wanted(
        "the engine to adopt version 17", fix="see engine.log", of="engine", holding="step 17", deadline_s=180
    )
    with waits.waiting(adoption) as wait:
        for seconds in (179, 181, 182):
            clock.now_s = seconds
            wait.problem = "no answer"
            dog.look()
    late = [fields for event, fields in said if event == "late"]
    assert late == [
        {
            "for": "the engine to adopt version 17",
            "seconds": 181,
            "turn_of": "engine",
            "holding": "step 17",
            "problem": "no answer",
            "fix": "see engine.log",
        }
    ]
    assert "test_a_wait_past_its_deadline" in capfd.readouterr().err, "the stack of this very thread"


def test_who_waits_for_the_same_is_one_wait_and_the_first_answer_ends_it() -> None:
    clock = FakeClock()
    waits = Waits(clock)
    first, second = waits.begin(HUB), waits.begin(HUB)
    assert first is second
    waits.end(first, was_met=False)
    assert waits.longest is second, "one gave up, the other still waits"
    waits.end(second, was_met=True)
    assert waits.now == []


def test_the_longest_wait_stands_first() -> None:
    clock = FakeClock()
    waits = Waits(clock)
    old, new = Wanted("old"), Wanted("new")
    with waits.waiting(old):
        clock.now_s = 5
        with waits.waiting(new):
            clock.now_s = 6
            assert [wait.wanted.what for wait in waits.now] == ["old", "new"]
            assert waits.longest is not None
            assert waits.longest.seconds == 6


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
            await asyncio.sleep(0.05)
            assert waits.now == [], "it moves again"

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


def test_stacks_show_threads_and_coroutines_and_a_signal_does_not_end_the_process() -> None:
    done = subprocess.run([sys.executable, "-c", STUCK], capture_output=True, text=True, check=False, timeout=30)
    assert done.returncode == 7, done.stderr
    assert done.stderr.count("counting_sheep") == 2, "asked for by a call and by the signal"
    assert "waiting_for_godot" in done.stderr
