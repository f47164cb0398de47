"""Monitor a run once a second: waits, silent processes, progress, and the memory of all processes.

late wait          one line; the waiting and the awaited process write their stacks (watch/watchdog.py, hub/state.py)
silent process     one line; a signal makes it write its stacks, even if it is stuck inside a library
no progress        the run is stopped, with a list of all waits
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import psutil  # type: ignore[import-untyped]

from treadle.background import awake_s
from treadle.config.flag_spelling import respell_flags
from treadle.config.schema import SECTIONS_OF_PROCESS
from treadle.errors import RunStalled
from treadle.net.address import shown_url
from treadle.net.probe import get
from treadle.watch.describe import SHOWN_AFTER_S, SILENT_AFTER_S, describe_now, describe_problems, describe_wait
from treadle.watch.stacks import SIGNAL
from treadle.wire.hub import GENERATED_TOKENS, LastReport, Processes

POLL_EVERY_S = 1.0
RATE_WINDOW_S = 15.0  # window of the token rate; long, because an engine counts tokens only when a completion ends
SILENT_S = 30.0
STACKS_TAKE_S = 1.0
MAX_ALARMS = 200
SILENT, PROBLEM = "silent", "problem"


@dataclass(frozen=True)
class RunStatus:
    """The state of a run, as the monitor sees it.

    now        what is waited for now, in a few words
    notes      explanations of current problems and long waits; empty while every wait is normal
    alarms     late waits and silent processes, once each
    restarts   of processes, once each: a line with the reason; of the trainer also the last lines of the log
    findings   problems that processes reported about their work, once each
    standings  the processes, as the hub knows them
    generated_tok_s  sampled tokens per second of all engines; None: not known yet
    """

    now: str = ""
    notes: tuple[str, ...] = ()
    alarms: tuple[str, ...] = ()
    findings: tuple[str, ...] = ()
    restarts: tuple[str, ...] = ()
    standings: tuple[LastReport, ...] = ()
    generated_tok_s: float | None = None


class TokenRate:
    """Tokens per second, from a growing count.

    >>> tokens = TokenRate()
    >>> tokens.rate(0.0, 100), tokens.rate(2.0, 500)
    (None, 200.0)
    """

    def __init__(self) -> None:
        self._seen: deque[tuple[float, float]] = deque()

    def rate(self, now_s: float, num_tokens: float) -> float | None:
        """Over the last RATE_WINDOW_S; None at the first count, also after a restart of the engine."""
        if self._seen and num_tokens < self._seen[-1][1]:
            self._seen.clear()
        self._seen.append((now_s, num_tokens))
        while len(self._seen) > 2 and self._seen[1][0] <= now_s - RATE_WINDOW_S:
            self._seen.popleft()
        first_s, first = self._seen[0]
        return (num_tokens - first) / (now_s - first_s) if now_s > first_s else None


class RunMonitor:
    """`pids` and `log_folder`: of the processes of the run. `stall_s`: seconds without progress after which the run is
    stopped, 0 for never."""

    def __init__(
        self,
        hub_url: str,
        pids: Callable[[], Mapping[str, int]],
        log_folder: Path,
        stall_s: float,
        clock: Callable[[], float] = awake_s,
    ) -> None:
        self._hub_url = hub_url
        self._pids = pids
        self._log_folder = log_folder
        self._stall_s = stall_s
        self._clock = clock
        self._next_poll_s = 0.0
        self._hub_heard_s = clock()
        self._moved_s = clock()
        self._progress: Hashable = None
        self._raised: set[tuple[str, str]] = set()
        self._tokens = TokenRate()
        self.status = RunStatus()

    def poll(self, progress: Hashable, *, is_starting: bool = False) -> None:
        """`progress`: steps and evaluations that the launcher has seen. `is_starting`: no progress is expected, because
        each process has a time limit for its start."""
        if self._clock() < self._next_poll_s:
            return
        self._next_poll_s = self._clock() + POLL_EVERY_S
        answer = get(f"{self._hub_url}/v1/processes")
        if answer is None:
            self._check_silent("hub", self._clock() - self._hub_heard_s)
        else:
            self._hub_heard_s = self._clock()
        standings = [_in_flags_of_run(standing) for standing in read_processes(answer or b"")]
        notes = tuple(line for standing in standings for line in describe_problems(standing, with_fixes=True))
        # An alarm that is over is raised again when it comes back.
        known = {(s.report.name, wait.what) for s in standings for wait in s.report.waits if wait.is_late}
        known |= {(s.report.name, PROBLEM) for s in standings if s.report.problem}
        self._raised = {key for key in self._raised if key in known or key[1] == SILENT}
        for standing in standings:
            self._check_process(standing)
        tokens = [count for s in standings if (count := s.report.counts.get(GENERATED_TOKENS)) is not None]
        self.status = replace(
            self.status,
            now=describe_now(standings),
            notes=notes,
            standings=tuple(standings),
            generated_tok_s=self._tokens.rate(self._clock(), sum(tokens)) if tokens else None,
        )
        # If the hub does not list its processes to this token, only a part of the progress is visible.
        is_known = answer is None or bool(standings)
        is_comparable = is_known and not is_starting
        # Counters that change while a run progresses: groups, tokens, versions.
        counts = [
            (s.report.name, s.report.policy_version, s.report.work, *sorted(s.report.counts.items())) for s in standings
        ]
        self._check_progress((progress, *counts) if is_comparable else object(), standings)

    def note_restart(self, text: str) -> None:
        self.status = replace(self.status, restarts=(*self.status.restarts, text))

    def _check_process(self, standing: LastReport) -> None:
        report = standing.report
        for wait in report.waits:
            if wait.is_late and standing.heard_s <= SILENT_AFTER_S:
                own = self._name_of(report.pid, report.kind)
                logs = " and ".join(dict.fromkeys(str(log) for name in (own, wait.of) for log in self._logs_of(name)))
                self._alarm((report.name, wait.what), f"{describe_wait(report, wait)}; stacks are in {logs}", wait.fix)
        if report.problem and (report.name, PROBLEM) not in self._raised:
            self._raised.add((report.name, PROBLEM))
            finding = f"{report.name} {report.problem}; {report.fix}"
            self.status = replace(self.status, findings=(*self.status.findings, finding)[-MAX_ALARMS:])
        if report.pid in self._pids().values():
            self._check_silent(self._name_of(report.pid, report.kind), standing.heard_s)

    def _check_silent(self, name: str, seconds: float) -> None:
        if seconds < SILENT_S:
            self._raised.discard((name, SILENT))
            return
        pid = self._pids().get(name)
        if (name, SILENT) in self._raised:
            return
        if pid is None:
            if name == "hub" and self._pids():  # not started by this run
                line = f"the hub at {shown_url(self._hub_url)} has not answered for {seconds:.0f} s"
                self._alarm((name, SILENT), line, "start it again with its --database: the run then goes on")
            return
        _ask_for_stacks(pid)
        line = f"{name} (pid {pid}) has not reported for {seconds:.0f} s"
        is_stopped = False
        with contextlib.suppress(psutil.Error):
            is_stopped = psutil.Process(pid).status() == psutil.STATUS_STOPPED
        if is_stopped:
            self._alarm((name, SILENT), f"{line}: it is stopped (Ctrl-Z, SIGSTOP)", f"kill -CONT {pid}")
        else:
            line += f"; its stacks are in {self._log_folder / name}.log"
            self._alarm((name, SILENT), line, "it may be stuck, or short of processor time or memory")

    def _alarm(self, key: tuple[str, str], line: str, fix: str) -> None:
        if key not in self._raised:
            self._raised.add(key)
            alarms = (*self.status.alarms, f"{line}; {fix}" if fix else line)[-MAX_ALARMS:]
            self.status = replace(self.status, alarms=alarms)

    def _check_progress(self, progress: Hashable, standings: list[LastReport]) -> None:
        if progress != self._progress:
            self._progress, self._moved_s = progress, self._clock()
        stalled_s = self._clock() - self._moved_s
        if self._stall_s and stalled_s > self._stall_s:
            for pid in self._pids().values():
                _ask_for_stacks(pid)
            time.sleep(STACKS_TAKE_S)
            long = [(s.report, wait) for s in standings for wait in s.report.waits if wait.seconds >= SHOWN_AFTER_S]
            waits = (
                "; ".join(describe_wait(report, wait) for report, wait in long) or "no process says what it waits for"
            )
            raise RunStalled(
                f"nothing has moved for {stalled_s:.0f} s: {waits}",
                fix=f"the logs in {self._log_folder} say more and have the stacks; --stall-timeout-s gives it longer",
            )

    def _name_of(self, pid: int, kind: str) -> str:
        """The name that the launcher gave a process; its kind if this run did not start it."""
        return next((name for name, own in self._pids().items() if own == pid), kind)

    def _logs_of(self, name: str) -> list[Path]:
        """The log of a process; for "env" those of all environments."""
        of_kind = [process for process in self._pids() if process.startswith(f"{name}-")] if name else []
        return [self._log_folder / f"{process}.log" for process in of_kind or ([name] if name else [])]


def _ask_for_stacks(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, SIGNAL)


def read_processes(body: bytes) -> list[LastReport]:
    """[] if the answer is not a list of processes: the hub may require a token that the caller does not have."""
    try:
        return msgspec.json.decode(body, type=Processes).processes
    except msgspec.MsgspecError:
        return []


def _in_flags_of_run(standing: LastReport) -> LastReport:
    """Replace flags of the process in fixes by those of `treadle run`, which the user gave."""
    report = standing.report
    section = SECTIONS_OF_PROCESS.get(report.kind, ("",))[0]
    waits = [msgspec.structs.replace(wait, fix=respell_flags("run", wait.fix, section)) for wait in report.waits]
    own = msgspec.structs.replace(report, fix=respell_flags("run", report.fix, section), waits=waits)
    return msgspec.structs.replace(standing, report=own)


Measure = Callable[[psutil.Process], int]
EXACT_EVERY_S = 20.0
EXACT_GROWTH = 1.02


class MemorySampler:
    """Samples once a second in a thread, and keeps the peaks.

    `pids` returns the children by name, each the leader of its session: {"engine": 4711}. Their descendants and the
    processes of their session are counted as theirs.

    Proportional set size (a page that two processes share counts half for each) takes the kernel 60 ms with 4 GB, so
    it is read every 20 s and when resident memory has grown by 2 %. In between it is scaled with resident memory.
    """

    def __init__(
        self, pids: Callable[[], Mapping[str, int]], *, interval_s: float = 1.0, measure: Measure | None = None
    ) -> None:
        self.now_bytes = 0
        self.peak_bytes = 0
        self.peak_by_process: dict[str, int] = {}
        self._pids = pids
        self._interval_s = interval_s
        self._measure = measure or proportional_bytes
        self._exact_s = -EXACT_EVERY_S
        self._exact_resident = 0  # maximum of all exact samples
        self._exact_share = 1.0  # proportional / resident memory of the last one
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._sample_until_over, name="memory", daemon=True)

    def __enter__(self) -> MemorySampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join(timeout=5)

    def sample(self) -> None:
        processes = self._processes()
        resident = sum(_size(process, resident_bytes) for process, _ in processes)
        is_due = time.monotonic() - self._exact_s >= EXACT_EVERY_S
        if not is_due and resident <= EXACT_GROWTH * self._exact_resident:
            self.now_bytes = int(resident * self._exact_share)
            return
        used: dict[str, int] = {}
        for process, name in processes:
            used[name] = used.get(name, 0) + _size(process, self._measure)
        self.now_bytes = sum(used.values())
        self.peak_bytes = max(self.peak_bytes, self.now_bytes)
        for name, size in used.items():
            self.peak_by_process[name] = max(self.peak_by_process.get(name, 0), size)
        self._exact_s = time.monotonic()
        self._exact_resident = max(self._exact_resident, resident)
        self._exact_share = self.now_bytes / max(1, resident)

    def _processes(self) -> list[tuple[psutil.Process, str]]:
        """All processes of the run, each with the name of its child."""
        names = {pid: name for name, pid in self._pids().items()}
        launcher = psutil.Process()
        found = []
        for process in [launcher, *launcher.children(recursive=True)]:  # parents come before their children
            try:
                pid = process.pid
                names[pid] = names.get(pid) or names.get(process.ppid()) or names.get(os.getsid(pid), "launcher")
                found.append((process, names[pid]))
            except (psutil.Error, ProcessLookupError):
                continue  # it ended after it was listed
        return found

    def _sample_until_over(self) -> None:
        while not self._is_over.wait(self._interval_s):
            try:
                self.sample()
            except (psutil.Error, OSError):
                continue  # a failed measurement must not end a run


def _size(process: psutil.Process, measure: Measure) -> int:
    try:
        return measure(process)
    except (psutil.Error, ProcessLookupError):  # it ended meanwhile
        return 0


def resident_bytes(process: psutil.Process) -> int:
    return int(process.memory_info().rss)


def proportional_bytes(process: psutil.Process) -> int:
    try:
        full = process.memory_full_info()
    except psutil.AccessDenied:
        return resident_bytes(process)
    return int(getattr(full, "pss", full.rss))
