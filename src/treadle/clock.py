"""Monotonic time that leaves out pauses of this process.

A process that is stopped (Ctrl-Z, SIGSTOP), or whose virtual machine is paused, hears nobody. Deadlines for others are
measured by `awake_s`, so that a pause takes nothing of their time.
"""

from __future__ import annotations

import os
import threading
import time

TICK_S = 0.25
LONGEST_STEP_S = 1.0  # that the clock may take between two readings; longer was a pause


class _AwakeClock:
    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        self._lock = threading.Lock()
        self._read_at_s = self._awake_s = time.monotonic()
        self._ticker: threading.Thread | None = None

    def __call__(self) -> float:
        """Seconds since some moment during which this process ran."""
        with self._lock:
            if self._ticker is None:
                self._ticker = threading.Thread(target=self._tick, name="awake-clock", daemon=True)
                self._ticker.start()
            now_s = time.monotonic()
            self._awake_s += min(now_s - self._read_at_s, LONGEST_STEP_S)
            self._read_at_s = now_s
            return self._awake_s

    def _tick(self) -> None:
        """Read the clock where nobody else does: without readings an idle process would seem to be paused."""
        while True:
            time.sleep(TICK_S)
            self()


awake_s = _AwakeClock()
os.register_at_fork(after_in_child=awake_s.begin)  # threads do not survive a fork
