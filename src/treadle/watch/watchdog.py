"""Watch the waits of a process in a thread: log slow ones, dump stacks when late, report to the hub.

after 2 s         the wait is logged, then at growing intervals
at its deadline   one error line and the stacks of this process; the hub's reply to the report makes the process that is
                  waited for write its own
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

import msgspec

from treadle.log import get_logger
from treadle.net.access_tokens import HUB_TOKEN_VARIABLE, bearer_headers
from treadle.net.client import OK, BlockingHttpClient, NoAnswer
from treadle.watch.describe import ENDED, short
from treadle.watch.stacks import include_tasks_of, write_stacks
from treadle.watch.waits import Wait, Waits, WaitSpec
from treadle.wire.engines import ServedEngine
from treadle.wire.hub import Kind, ProcessReport, ReportTaken, WaitReport, WorkReport

log = get_logger("watchdog")

CHECK_EVERY_S = 0.5
REPORT_EVERY_S = 2.0
FIRST_LOG_S = 2.0  # a shorter wait is not logged
LONGEST_PAUSE_S = 600.0  # between two lines about one wait
BLOCKED_LOOP_S = 10.0
MAX_REPORTED_WAITS = 8
LEAVE_WITHIN_S = 1.0
SEND_TIMEOUT_S = 2.0
ROUTE = "/v1/reports"
BLOCKED_LOOP = WaitSpec(
    "the event loop: one piece of code holds it, and nothing else in this process runs",
    fix="the stacks in its log show the code: let it await, or run it with asyncio.to_thread",
    deadline_s=BLOCKED_LOOP_S,
)


class Heartbeat:
    """Sends reports to the hub: `Heartbeat("http://127.0.0.1:8000").send(report)`. A hub that is away is no error here.

    The hub's token comes from the environment; the URL may carry one too, as /t/TOKEN at its end.
    """

    def __init__(self, hub_url: str) -> None:
        headers = {"Content-Type": "application/json", **bearer_headers(os.environ.get(HUB_TOKEN_VARIABLE))}
        self._hub = BlockingHttpClient(hub_url, headers=headers, timeout_s=SEND_TIMEOUT_S)
        self._refused_with = OK

    def send(self, report: ProcessReport) -> ReportTaken | None:
        """The hub's reply; None where there was none."""
        try:
            answer = self._hub.request("POST", ROUTE, body=msgspec.json.encode(report))
            if answer.status != OK:
                if answer.status != self._refused_with:
                    self._refused_with = answer.status
                    log.warning("report_refused", status=answer.status, hub_says=answer.text[:200])
                return None
            return msgspec.json.decode(answer.content, type=ReportTaken)
        except (NoAnswer, msgspec.MsgspecError):
            return None


@dataclass(frozen=True)
class ProcessFacts:
    """The part of a process report that is not about waits."""

    state: str = ""
    policy_version: int | None = None
    problem: str = ""
    fix: str = ""
    counts: dict[str, float] = field(default_factory=dict)
    env_id: int | None = None
    work: WorkReport | None = None
    serves: ServedEngine | None = None


@dataclass
class _LoggedWait:
    next_s: float = FIRST_LOG_S
    pause_s: float = FIRST_LOG_S
    is_logged: bool = False
    is_late: bool = False
    num_served: int = 0


class Watchdog:
    """`with Watchdog("trainer", "trainer", waits, hub_url, describe): ...`

    Without a hub it only logs. `loop`: an event loop that no code may block.
    """

    def __init__(
        self,
        kind: Kind,
        name: str,
        waits: Waits,
        hub_url: str = "",
        describe: Callable[[], ProcessFacts] = ProcessFacts,
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
        self._logged: dict[Wait, _LoggedWait] = {}
        self._failures: set[type[Exception]] = set()  # logged once each
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
        self._thread.join(timeout=LEAVE_WITHIN_S)  # it may wait for a slow hub

    def _run(self) -> None:
        checks = 0
        while True:
            try:
                self._ping_loop()
                self.check()
                if checks * CHECK_EVERY_S % REPORT_EVERY_S == 0:
                    self._report(self._describe())
            except Exception as error:  # the watchdog must go on after one failed check
                if type(error) not in self._failures:
                    self._failures.add(type(error))
                    log.error("watchdog_failed", exc_info=True, problem=str(error))
            checks += 1
            if self._ended.wait(CHECK_EVERY_S):
                break
        self._report(ProcessFacts(state=ENDED))

    def check(self) -> None:
        """Log the waits of this moment that are slow or late."""
        waits = self._waits.now
        for wait in waits:
            logged = self._logged.setdefault(wait, _LoggedWait())
            if wait.num_served != logged.num_served:
                logged = self._logged[wait] = _LoggedWait(num_served=wait.num_served, is_logged=logged.is_logged)
            if wait.is_late and not logged.is_late:
                logged.is_late = logged.is_logged = True
                log.error("late", **_log_fields(wait))
                write_stacks(f"{self._name} has waited {wait.seconds:.0f} s for {wait.wanted.what}")
            elif wait.fix and wait.seconds >= logged.next_s:
                logged.is_logged = True
                log.info("waiting", **_log_fields(wait))
            if wait.seconds >= logged.next_s:
                logged.pause_s = min(2 * logged.pause_s, LONGEST_PAUSE_S)
                logged.next_s += logged.pause_s
        for wait in set(self._logged) - set(waits):
            if self._logged.pop(wait).is_logged and wait.was_met:
                log.info("waited", **{"for": wait.wanted.what}, seconds=wait.seconds)

    def _ping_loop(self) -> None:
        """Start a wait that ends when the event loop runs a callback."""
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

    def _report(self, about: ProcessFacts) -> None:
        if self._heartbeat is None:
            return
        taken = self._heartbeat.send(report_of(self._kind, self._name, about, self._waits))
        if taken is not None and taken.dump:
            write_stacks(taken.dump)


def report_of(kind: Kind, name: str, about: ProcessFacts, waits: Waits) -> ProcessReport:
    # The loop is pinged all the time: that counts as a wait only when it is late.
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
        serves=about.serves,
        waits=[_wait_report(wait) for wait in longest[:MAX_REPORTED_WAITS]],
    )


def memory_bytes() -> int:
    """Resident memory of this process; 0 where /proc has no statm."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return 0


def _wait_report(wait: Wait) -> WaitReport:
    return WaitReport(
        what=short(wait.wanted.what),
        seconds=round(wait.seconds, 1),
        of=wait.wanted.of,
        holding=short(wait.wanted.holding),
        problem=short(wait.problem),
        fix=short(wait.fix),
        is_late=wait.is_late,
        deadline_s=wait.deadline_s if math.isfinite(wait.deadline_s) else None,
    )


def _log_fields(wait: Wait) -> dict[str, Any]:
    named = {"process": wait.wanted.of, "holding": wait.wanted.holding, "problem": wait.problem, "fix": wait.fix}
    return {"for": wait.wanted.what, "seconds": wait.seconds, **{key: text for key, text in named.items() if text}}
