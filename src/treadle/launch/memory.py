"""Measure the memory of all processes of a run together, without counting a shared page twice."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping

import psutil  # type: ignore[import-untyped]

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
        if is_due or resident > EXACT_GROWTH * self._exact_resident:
            self._sample_exactly(processes)
            self._exact_s = time.monotonic()
            self._exact_resident = max(self._exact_resident, resident)
            self._exact_share = self.now_bytes / max(1, resident)
        else:
            self.now_bytes = int(resident * self._exact_share)

    def _sample_exactly(self, processes: list[tuple[psutil.Process, str]]) -> None:
        used: dict[str, int] = {}
        for process, name in processes:
            used[name] = used.get(name, 0) + _size(process, self._measure)
        self.now_bytes = sum(used.values())
        self.peak_bytes = max(self.peak_bytes, self.now_bytes)
        for name, size in used.items():
            self.peak_by_process[name] = max(self.peak_by_process.get(name, 0), size)

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
