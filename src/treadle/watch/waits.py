"""Record what a process waits for: name, start, deadline, and the process that is waited for.

    waits = Waits()
    with waits.waiting(WaitSpec("the engine to adopt version 17", of="engine", deadline_s=180, fix="see its log")):
        ...

Threads and coroutines record waits; the watchdog reads them.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from treadle import faults
from treadle.background import awake_s

Clock = Callable[[], float]


@dataclass(frozen=True)
class WaitSpec:
    what: str  # "the hub at http://127.0.0.1:8000"
    fix: str = ""  # what the user can do; empty: nothing, and it is not logged before its deadline
    of: str = ""  # the process that is waited for: "hub", "engine", "env", "trainer"; empty: none of these
    holding: str = ""  # what is held up meanwhile: "the batch of step 17 (8 groups)"
    deadline_s: float = math.inf  # longer is not normal


class Wait:
    """One wait, shared by all threads and coroutines of this process that wait for the same thing."""

    def __init__(self, wanted: WaitSpec, clock: Clock) -> None:
        self.wanted = wanted
        self.problem = ""  # the last error; problem and fix may change while the wait lasts
        self.fix = wanted.fix
        self.deadline_s = faults.deadline_of(wanted.what, wanted.deadline_s)
        self.num_waiting = 0
        self.num_served = 0  # waiters that got it; each restarts the clock
        self.was_met = False
        self._clock = clock
        self.since_s = clock()
        self.until_s: float | None = None  # None: it goes on

    @property
    def seconds(self) -> float:
        return (self._clock() if self.until_s is None else self.until_s) - self.since_s

    @property
    def is_late(self) -> bool:
        return self.seconds > self.deadline_s


class Waits:
    """The current waits of this process."""

    def __init__(self, clock: Clock = awake_s) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._waits: dict[WaitSpec, Wait] = {}

    @property
    def now(self) -> list[Wait]:
        """Longest first."""
        with self._lock:
            return sorted(self._waits.values(), key=lambda wait: -wait.seconds)

    @contextmanager
    def waiting(self, wanted: WaitSpec) -> Iterator[Wait]:
        """Record a wait for the duration of the block; an exception counts as not met."""
        wait = self.begin(wanted)
        was_met = False
        try:
            yield wait
            was_met = True
        finally:
            self.end(wait, was_met=was_met)

    def begin(self, wanted: WaitSpec) -> Wait:
        with self._lock:
            wait = self._waits.get(wanted)
            if wait is None:
                wait = self._waits[wanted] = Wait(wanted, self._clock)
            wait.num_waiting += 1
            return wait

    def end(self, wait: Wait, *, was_met: bool) -> None:
        with self._lock:
            wait.num_waiting -= 1
            if wait.num_waiting == 0:
                del self._waits[wait.wanted]
                wait.was_met, wait.until_s = was_met, self._clock()
            elif was_met:  # one of the waiters got what it waited for: the clock starts again
                wait.num_served += 1
                wait.problem, wait.since_s = "", self._clock()
