"""How long the queue was, over the time that this hub has been up. In memory: a restart begins anew."""

from __future__ import annotations

import contextlib
import sqlite3
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from treadle.store import Store

EVERY_S = 2.0
MAX_SAMPLES = 2_000


class QueueSample(msgspec.Struct, frozen=True):
    at: float  # Unix time
    queued: int  # groups that wait
    leased: int  # groups that are being trained


@dataclass
class Thinned:
    """Samples of any stretch of time in a bounded number: when it is full, every second one goes.

    >>> course = Thinned(max_samples=4)
    >>> for second in range(9):
    ...     course.add(QueueSample(second, second, 0))
    >>> [sample.at for sample in course.samples]
    [0, 2, 4, 6, 8]
    """

    max_samples: int = MAX_SAMPLES
    samples: list[QueueSample] = field(default_factory=list)
    _every: int = 1
    _num_seen: int = 0

    def add(self, sample: QueueSample) -> None:
        if self._num_seen % self._every == 0:
            if len(self.samples) > self.max_samples:
                self.samples = self.samples[::2]
                self._every *= 2
            if self._num_seen % self._every == 0:
                self.samples.append(sample)
        self._num_seen += 1


class QueueHistory:
    def __init__(self, store: Store, *, every_s: float = EVERY_S, clock: Callable[[], float] = time.time) -> None:
        self._store = store
        self._every_s = every_s
        self._clock = clock
        self._course = Thinned()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="page-queue", daemon=True)
        self._thread.start()

    def samples(self) -> list[QueueSample]:
        """Those that are kept, and how it is now."""
        return [*self._course.samples, self._look()]

    def close(self) -> None:
        self._is_over.set()
        self._thread.join()

    def _look(self) -> QueueSample:
        counts = self._store.counts()
        return QueueSample(self._clock(), counts.queued.groups, counts.leased.groups)

    def _watch(self) -> None:
        is_over = False
        while not is_over:
            with contextlib.suppress(sqlite3.Error):  # the hub itself will say what is wrong with its queue
                self._course.add(self._look())
            is_over = self._is_over.wait(self._every_s)
