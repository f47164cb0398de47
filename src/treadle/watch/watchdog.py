"""A thread that looks at the waits of its process: says what takes long, and tells the hub.

wait --2 s--> told, ever more rarely --deadline--> one line, the stacks of this process; by the hub's answer to its
                                                   report, whose turn it is writes its own
"""

from __future__ import annotations

import asyncio
import math
import os
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from treadle.log import get_logger
from treadle.watch.heartbeat import Heartbeat
from treadle.watch.stacks import include_tasks_of, write_stacks
from treadle.watch.telling import LAST_WORD, short
from treadle.watch.waits import Wait, Waits, Wanted
from treadle.wire.hub import Kind, ProcessReport, WaitReport, WorkReport

log = get_logger("watchdog")

LOOK_EVERY_S = 0.5
REPORT_EVERY_S = 2.0
FIRST_TOLD_S = 2.0
LONGEST_SILENCE_S = 600.0
BLOCKED_LOOP_S = 10.0
MOST_REPORTED = 8
LEAVE_WITHIN_S = 1.0
BLOCKED_LOOP = Wanted(
    "the event loop: one piece of code holds it, and nothing else of this process moves",
    fix="the stacks in its log show the code: let it await, or run it with asyncio.to_thread",
    deadline_s=BLOCKED_LOOP_S,
)


@dataclass(frozen=True)
class About:
    """What a process says of itself, beside its waits."""

    state: str = ""
    policy_version: int | None = None
    problem: str = ""
    fix: str = ""
    counts: dict[str, float] = field(default_factory=dict)
    env_id: int | None = None
    work: WorkReport | None = None


@dataclass
class _Told:
    next_s: float = FIRST_TOLD_S
    pause_s: float = FIRST_TOLD_S
    is_told: bool = False
    is_late: bool = False
    num_served: int = 0


class Watchdog:
    """`with Watchdog("trainer", "trainer", waits, hub_url, describe): ...`

    Without a hub it only speaks to the log. `loop`: an event loop that no code may hold.
    """

    def __init__(
        self,
        kind: Kind,
        name: str,
        waits: Waits,
        hub_url: str = "",
        describe: Callable[[], About] = About,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self._kind = kind
        self._name = name
        self._waits = waits
        self._heartbeat = Heartbeat(hub_url) if hub_url else None
        self._describe = describe
        self._loop: asyncio.AbstractEventLoop | None = None
        if loop is not None:
            self.watch_loop(loop)
        self._loop_wait: Wait | None = None
        self._told: dict[Wait, _Told] = {}
        self._failures: set[str] = set()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        self._thread.start()
        return self

    def watch_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        include_tasks_of(loop)
        self._loop = loop

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join(timeout=LEAVE_WITHIN_S)  # it may be speaking with a hub that is slow to answer

    def _run(self) -> None:
        looks = 0
        while True:
            try:
                self._ping_loop()
                self.look()
                if looks * LOOK_EVERY_S % REPORT_EVERY_S == 0:
                    self._report(self._describe())
            except Exception as error:  # who watches must not fall silent because of one bad look
                self._tell_failure(error)
            looks += 1
            if self._ended.wait(LOOK_EVERY_S):
                break
        self._report(About(state=LAST_WORD))

    def _tell_failure(self, error: Exception) -> None:
        kind = type(error).__name__
        if kind not in self._failures:
            self._failures.add(kind)
            log.error("watchdog_failed", exc_info=True, problem=str(error))

    def look(self) -> None:
        """Say what is to be said of the waits of this moment."""
        waits = self._waits.now
        for wait in waits:
            told = self._told.setdefault(wait, _Told())
            if wait.num_served != told.num_served:
                told = self._told[wait] = _Told(num_served=wait.num_served, is_told=told.is_told)
            if wait.is_late and not told.is_late:
                told.is_late = told.is_told = True
                log.error("late", **_words(wait))
                write_stacks(f"{self._name} has waited {wait.seconds:.0f} s for {wait.wanted.what}")
            elif wait.fix and wait.seconds >= told.next_s:
                told.is_told = True
                log.info("waiting", **_words(wait))
            if wait.seconds >= told.next_s:
                told.pause_s = min(2 * told.pause_s, LONGEST_SILENCE_S)
                told.next_s += told.pause_s
        for wait in set(self._told) - set(waits):
            if self._told.pop(wait).is_told and wait.was_met:
                log.info("waited", **{"for": wait.wanted.what}, seconds=wait.seconds)

    def _ping_loop(self) -> None:
        """The loop's answer to the last question ends the wait; then it is asked again."""
        if self._loop is None or self._loop_wait is not None:
            return
        self._loop_wait = self._waits.begin(BLOCKED_LOOP)
        try:
            self._loop.call_soon_threadsafe(self._pong, self._loop_wait)
        except RuntimeError:  # it is closed
            self._pong(self._loop_wait)
            self._loop = None

    def _pong(self, wait: Wait) -> None:
        self._waits.end(wait, was_met=True)
        self._loop_wait = None

    def _report(self, about: About) -> None:
        if self._heartbeat is None:
            return
        taken = self._heartbeat.send(report_of(self._kind, self._name, about, self._waits))
        if taken is not None and taken.dump:
            write_stacks(taken.dump)


def report_of(kind: Kind, name: str, about: About, waits: Waits) -> ProcessReport:
    # The loop is asked again and again: that is no wait before it is late.
    longest = [wait for wait in waits.now if wait.wanted is not BLOCKED_LOOP or wait.is_late]
    return ProcessReport(
        kind=kind,
        name=short(name),
        machine=socket.gethostname(),
        pid=os.getpid(),
        state=about.state,
        policy_version=about.policy_version,
        memory_bytes=memory_bytes(),
        problem=short(about.problem),
        fix=short(about.fix),
        counts=about.counts,
        env_id=about.env_id,
        work=about.work,
        waits=[_told(wait) for wait in longest[:MOST_REPORTED]],
    )


def memory_bytes() -> int:
    """Of this process, resident; 0 where the system does not say it in a file."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return 0


def _told(wait: Wait) -> WaitReport:
    return WaitReport(
        what=short(wait.wanted.what),
        seconds=round(wait.seconds, 1),
        of=wait.wanted.of,
        holding=short(wait.wanted.holding),
        problem=short(wait.problem),
        fix=short(wait.fix),
        is_late=wait.is_late,
        deadline_s=wait.wanted.deadline_s if math.isfinite(wait.wanted.deadline_s) else None,
    )


def _words(wait: Wait) -> dict[str, Any]:
    named = {"turn_of": wait.wanted.of, "holding": wait.wanted.holding, "problem": wait.problem, "fix": wait.fix}
    return {"for": wait.wanted.what, "seconds": wait.seconds, **{key: text for key, text in named.items() if text}}
