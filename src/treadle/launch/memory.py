"""How much memory a run takes, all processes together, without counting a shared page twice."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping

import psutil  # type: ignore[import-untyped]


class MemorySampler:
    """Sample once a second, in a thread of its own, and keep the peaks.

    `pids` gives the children by name, each the leader of its session: {"engine": 4711}. What they have started counts
    as theirs, and so does what runs in their session.
    """

    def __init__(self, pids: Callable[[], Mapping[str, int]], *, interval_s: float = 1.0) -> None:
        self.now_bytes = 0
        self.peak_bytes = 0
        self.peak_by_process: dict[str, int] = {}
        self._pids = pids
        self._interval_s = interval_s
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._sample_until_over, name="memory", daemon=True)

    def __enter__(self) -> MemorySampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join(timeout=5)

    def sample(self) -> None:
        """Proportional set size: a page that two processes share counts half for each."""
        names = {pid: name for name, pid in self._pids().items()}
        launcher = psutil.Process()
        used: dict[str, int] = {}
        for process in [launcher, *launcher.children(recursive=True)]:  # whoever started another comes before it
            try:
                pid = process.pid
                name = names.get(pid) or names.get(process.ppid()) or names.get(os.getsid(pid), "launcher")
                names[pid] = name
                used[name] = used.get(name, 0) + memory_of(process)
            except (psutil.Error, ProcessLookupError):
                continue  # it ended between the listing and the look
        self.now_bytes = sum(used.values())
        self.peak_bytes = max(self.peak_bytes, self.now_bytes)
        for name, size in used.items():
            self.peak_by_process[name] = max(self.peak_by_process.get(name, 0), size)

    def _sample_until_over(self) -> None:
        while not self._is_over.wait(self._interval_s):
            try:
                self.sample()
            except (psutil.Error, OSError):
                continue  # a figure for the report is no reason to end a run


def memory_of(process: psutil.Process) -> int:
    try:
        full = process.memory_full_info()
    except psutil.AccessDenied:
        return int(process.memory_info().rss)
    return int(getattr(full, "pss", full.rss))
