"""What a process waits for: each wait with a name, since when, for how long at most, and whose turn it is.

    waits = Waits()
    with waits.waiting(Wanted("the engine to adopt version 17", of="engine", deadline_s=180, fix="see its log")):
        ...

Threads and coroutines write here; the watchdog reads.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from treadle.clock import awake_s

Clock = Callable[[], float]


@dataclass(frozen=True)
class Wanted:
    what: str  # "the hub at http://127.0.0.1:8000"
    fix: str = ""  # what the user can do; empty: nothing, and it need not be told before its deadline
    of: str = ""  # whose turn it is: "hub", "engine", "env", "trainer"; empty: nobody's of ours
    holding: str = ""  # what stands still meanwhile: "the batch of step 17 (8 groups)"
    deadline_s: float = math.inf  # longer is not normal


class Wait:
    """Of everyone in this process who waits for the same."""

    def __init__(self, wanted: Wanted, clock: Clock) -> None:
        self.wanted = wanted
        self.problem = ""  # what went wrong last, and what to do about it; may change while it lasts
        self.fix = wanted.fix
        self.num_waiting = 0
        self.num_served = 0  # of those who waited for the same; the clock begins anew with each
        self.was_met = False
        self._clock = clock
        self._since_s = clock()
        self._until_s: float | None = None

    @property
    def seconds(self) -> float:
        return (self._clock() if self._until_s is None else self._until_s) - self._since_s

    @property
    def is_late(self) -> bool:
        return self.seconds > self.wanted.deadline_s

    def begin_anew(self) -> None:
        """One of those who wait was served: what is wanted comes, and the others have not waited in vain so far."""
        self.num_served += 1
        self.problem = ""
        self._since_s = self._clock()

    def end(self, *, was_met: bool) -> None:
        self.was_met = was_met
        self._until_s = self._clock()


class Waits:
    """All that this process waits for now."""

    def __init__(self, clock: Clock = awake_s) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._waits: dict[Wanted, Wait] = {}

    @property
    def now(self) -> list[Wait]:
        """The longest first."""
        with self._lock:
            return sorted(self._waits.values(), key=lambda wait: -wait.seconds)

    @property
    def longest(self) -> Wait | None:
        return next(iter(self.now), None)

    @contextmanager
    def waiting(self, wanted: Wanted) -> Iterator[Wait]:
        """Left by an error, the wait was in vain; else what was wanted came."""
        wait = self.begin(wanted)
        was_met = False
        try:
            yield wait
            was_met = True
        finally:
            self.end(wait, was_met=was_met)

    def begin(self, wanted: Wanted) -> Wait:
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
                wait.end(was_met=was_met)
            elif was_met:
                wait.begin_anew()
