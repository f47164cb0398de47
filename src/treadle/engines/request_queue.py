"""Requests that wait to be generated: first come, first served, and the requests of a wave side by side."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field

from treadle.engines.interface import Delta, Generation, Request
from treadle.engines.model_runner import Sequence
from treadle.errors import EngineError
from treadle.log import get_logger
from treadle.wire.generate import Wave

log = get_logger("engine")
WAVE_PATIENCE_S = 10.0  # a wave whose last requests do not come is generated without them
MOST_PARTIAL_WAVES = 1024  # that are remembered; of those that never become complete, the oldest are forgotten

Tell = Callable[[list[Delta]], None]


@dataclass(eq=False)
class Job:
    """A request on its way to an answer."""

    request: Request
    tell: Tell | None  # takes what is new, after every token, when the answer is streamed
    submitted: float = field(default_factory=time.monotonic)
    future: Future[Generation] = field(default_factory=Future)
    sequences: list[Sequence] = field(default_factory=list)
    num_told: list[int] = field(default_factory=list)
    prompt_tops: list[dict[int, float]] | None = None
    admitted: float = 0.0
    adapter: str | None = None  # fixed when it is admitted, as is the version that it begins with
    policy_version: int = 0

    @property
    def takes_no_row(self) -> bool:
        """One token, off the prompt's last state: it joins no batch."""
        return self.request.max_tokens == 1 and self.request.wave is None

    @property
    def is_done(self) -> bool:
        return all(s.finish_reason for s in self.sequences)

    def news(self) -> list[Delta]:
        """What was sampled since the last call. A sequence that ended has been told when its end has."""
        return [self._delta(index, s) for index, s in enumerate(self.sequences) if self._has_news(index, s)]

    def fail(self, error: EngineError) -> None:
        with contextlib.suppress(InvalidStateError):  # its client has left
            self.future.set_exception(error)

    def _has_news(self, index: int, s: Sequence) -> bool:
        return len(s.token_ids) + (s.finish_reason is not None) > self.num_told[index]

    def _delta(self, index: int, s: Sequence) -> Delta:
        start = self.num_told[index]
        self.num_told[index] = len(s.token_ids) + (s.finish_reason is not None)
        return Delta(
            index=index,
            token_ids=s.token_ids[start:],
            logprobs=s.logprobs[start:],
            tops=s.tops[start:],
            text=s.written.news(is_finished=s.finish_reason is not None) if s.written else "",
            finish_reason=s.finish_reason,
            policy_version=s.policy_versions[-1],
        )


class WaitingLine:
    """Belongs to the scheduler, which locks it."""

    def __init__(self) -> None:
        self._jobs: list[Job] = []
        self._admitted_of_wave: dict[str, int] = {}  # waves of which a part is admitted already

    def __len__(self) -> int:
        return len(self._jobs)

    def append(self, job: Job) -> None:
        self._drop_replaced(job)
        self._jobs.append(job)

    def drop(self, is_unwanted: Callable[[Job], bool]) -> list[Job]:
        """Remove these; returns them."""
        dropped = [job for job in self._jobs if is_unwanted(job)]
        if dropped:
            self._jobs = [job for job in self._jobs if job not in dropped]
        return dropped

    def take(self, room: int, may_join: Callable[[Job, list[Job]], bool]) -> list[Job]:
        """The next jobs with together at most `room` completions; within a wave by index, so that arrival order does
        not decide the batch. The first that may not join those before it ends the search: nobody is overtaken.
        """
        # Those that need no room wait for none: a trainer's canary must not stand behind hundreds of rollouts.
        chosen = [job for job in self._jobs if job.takes_no_row and may_join(job, [])]
        if chosen:
            chosen = [job for job in chosen if may_join(job, chosen[:1])]
        present = Counter(job.request.wave.id for job in self._jobs if job.request.wave is not None)
        for job in self._in_order() if room else []:
            if job in chosen:
                continue
            if job.request.wave is not None and not self._is_complete(job, job.request.wave, present):
                continue
            if job.request.n > room or not may_join(job, chosen):
                break
            chosen.append(job)
            room -= job.request.n
        for job in chosen:
            self._jobs.remove(job)
            self._count(job.request.wave)
        return chosen

    def _in_order(self) -> list[Job]:
        arrival: dict[str, float] = {}
        for job in self._jobs:
            if job.request.wave is not None:
                arrival.setdefault(job.request.wave.id, job.submitted)

        def order(job: Job) -> tuple[float, int]:
            wave = job.request.wave
            return (arrival[wave.id], wave.index) if wave else (job.submitted, 0)

        return sorted(self._jobs, key=order)

    def _is_complete(self, job: Job, wave: Wave, present: Counter[str]) -> bool:
        """Whether all of its wave are here, or have been waited for long enough."""
        if present[wave.id] + self._admitted_of_wave.get(wave.id, 0) >= wave.size:
            return True
        if time.monotonic() - job.submitted < WAVE_PATIENCE_S:
            return False
        log.warning("wave_incomplete", wave=wave.id, present=present[wave.id], size=wave.size)
        return True

    def _drop_replaced(self, job: Job) -> None:
        """A client that was killed and came back asks for the same place in the same wave: the old request is dead."""
        place = _place(job)
        for old in self.drop(lambda other: _place(other) == place) if place else []:
            old.fail(EngineError("replaced by a newer request of the same wave"))

    def _count(self, wave: Wave | None) -> None:
        if wave is None:
            return
        count = self._admitted_of_wave.pop(wave.id, 0) + 1
        if count < wave.size:
            self._admitted_of_wave[wave.id] = count
        while len(self._admitted_of_wave) > MOST_PARTIAL_WAVES:
            del self._admitted_of_wave[next(iter(self._admitted_of_wave))]


def _place(job: Job) -> tuple[str, int] | None:
    wave = job.request.wave
    return (wave.id, wave.index) if wave else None
