"""Who is generated when: one thread that owns the engine, a waiting line, waves, and the pause between versions.

      submit() ──> waiting ──(room, not paused, wave complete)──> running ──> answer
                                      ^
      pause(): nothing is admitted; returns when nothing runs.  resume(version): the line moves again.

A request runs from its first to its last token under one version, because weights change only while nothing runs.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass

from treadle.engines.transformers_engine import Request, Sequence, TransformersEngine
from treadle.errors import EngineError
from treadle.log import get_logger
from treadle.wire.generate import Wave

log = get_logger("engine")
WAVE_PATIENCE_S = 10.0  # a wave whose last requests do not come is generated without them


@dataclass
class Finished:
    sequences: list[Sequence]
    policy_version: int
    seconds: float


@dataclass
class _Job:
    request: Request
    wave: Wave | None
    submitted: float
    future: Future[Finished]
    sequences: list[Sequence]
    admitted: float = 0.0
    policy_version: int = -1  # fixed when the request is admitted


class Scheduler:
    def __init__(
        self, engine: TransformersEngine, max_num_seqs: int, *, on_failure: Callable[[], None] = lambda: None
    ) -> None:
        self._engine = engine
        self._on_failure = on_failure
        self.max_num_seqs = max_num_seqs
        self._changed = threading.Condition()
        self._waiting: list[_Job] = []
        self._running: list[_Job] = []
        self._admitted_of_wave: dict[str, int] = {}  # waves of which a part is admitted already
        self._paused = False
        self._closed = False
        self.failure: str | None = None  # set when the generation thread died: /health must tell
        self.policy_version = 0
        self.generated_tokens = 0
        self.generating_s = 0.0
        self._thread = threading.Thread(target=self._loop, name="generation", daemon=True)
        self._thread.start()

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def is_paused(self) -> bool:
        return self._paused

    def submit(self, request: Request, wave: Wave | None) -> Future[Finished]:
        job = _Job(request, wave, time.monotonic(), Future(), [])
        with self._changed:
            self._refuse_when_dead()
            self._drop_replaced(job)
            self._waiting.append(job)
            self._changed.notify_all()
        return job.future

    def pause(self, timeout_s: float) -> None:
        """Admit nothing more; returns when nothing runs. On a time-out the engine goes on as before."""
        with self._changed:
            self._paused = True
            if not self._changed.wait_for(lambda: not self._running, timeout_s):
                self._paused = False
                self._changed.notify_all()
                raise EngineError(f"{len(self._running)} requests were still running after {timeout_s:.0f} s")
            self._refuse_when_dead()

    def resume(self, policy_version: int | None) -> None:
        """Go on, under a new version when one was published; that is possible only while nothing runs."""
        with self._changed:
            if policy_version is not None:
                if not self._paused or self._running:
                    raise EngineError(
                        "weights may change only while the engine is paused", fix="POST /bridge/pause first"
                    )
                self._engine.adopt()
                self.policy_version = policy_version
            self._paused = False
            self._changed.notify_all()

    def stop(self) -> None:
        """End after the token that is being computed; whoever waits is told."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def join(self) -> None:
        self._thread.join(timeout=5)

    def _loop(self) -> None:
        while True:
            with self._changed:
                admitted = self._wait_for_work()
            if self._closed:
                self._fail_all("the engine is shutting down")
                return
            started = time.monotonic()
            try:
                if admitted:
                    begun = self._engine.admit([job.request for job in admitted])
                    for job, sequences in zip(admitted, begun, strict=True):
                        job.sequences = sequences
                self._engine.step()
                self._answer_finished()
            except Exception as error:
                log.error("generation_failed", exc_info=True)
                self.failure = type(error).__name__
                self._fail_all(f"generation failed ({self.failure}); the engine's log says more")
                self._on_failure()
                return
            self.generating_s += time.monotonic() - started

    def _wait_for_work(self) -> list[_Job]:
        """Sleep until something runs or can be admitted; returns what to admit (called with the lock held)."""
        while not self._closed:
            admitted = [] if self._paused else self._admissible()
            if admitted or self._running:
                for job in admitted:
                    self._waiting.remove(job)
                    job.admitted = time.monotonic()
                    job.policy_version = self.policy_version
                    self._count_in_wave(job.wave)
                self._running += admitted
                return admitted
            # A wave that waits for its last member must not wait for ever.
            self._changed.wait(0.5 if self._waiting and not self._paused else None)
        return []

    def _admissible(self) -> list[_Job]:
        """First come, first served; within a wave by index, so that arrival order does not decide the batch."""
        arrival: dict[str, float] = {}
        for job in self._waiting:
            if job.wave is not None:
                arrival.setdefault(job.wave.id, job.submitted)

        def order(job: _Job) -> tuple[float, int]:
            return (arrival[job.wave.id], job.wave.index) if job.wave else (job.submitted, 0)

        room = self.max_num_seqs - self._engine.num_running
        chosen: list[_Job] = []
        for job in sorted(self._waiting, key=order) if room else []:
            if not self._may_start(job):
                continue
            if job.request.n > room:
                break
            chosen.append(job)
            room -= job.request.n
        return chosen

    def _may_start(self, job: _Job) -> bool:
        if job.wave is None:
            return True
        present = sum(1 for other in self._waiting if other.wave is not None and other.wave.id == job.wave.id)
        if present + self._admitted_of_wave.get(job.wave.id, 0) >= job.wave.size:
            return True
        if time.monotonic() - job.submitted < WAVE_PATIENCE_S:
            return False
        log.warning("wave_incomplete", wave=job.wave.id, present=present, size=job.wave.size)
        return True

    def _drop_replaced(self, job: _Job) -> None:
        """A client that was killed and came back asks for the same place in the same wave: the old request is dead."""
        for old in list(self._waiting):
            if job.wave and old.wave and (old.wave.id, old.wave.index) == (job.wave.id, job.wave.index):
                self._waiting.remove(old)
                old.future.set_exception(EngineError("replaced by a newer request of the same wave"))

    def _count_in_wave(self, wave: Wave | None) -> None:
        if wave is None:
            return
        count = self._admitted_of_wave.pop(wave.id, 0) + 1
        if count < wave.size:
            self._admitted_of_wave[wave.id] = count

    def _answer_finished(self) -> None:
        with self._changed:
            done = [job for job in self._running if all(s.finish_reason for s in job.sequences)]
            self._running = [job for job in self._running if job not in done]
            if not self._running:
                self._changed.notify_all()
        for job in done:
            self.generated_tokens += sum(len(s.token_ids) for s in job.sequences)
            with contextlib.suppress(InvalidStateError):  # its client has left
                job.future.set_result(Finished(job.sequences, job.policy_version, time.monotonic() - job.admitted))

    def _refuse_when_dead(self) -> None:
        if self._closed or self.failure is not None:
            raise EngineError(f"generation has ended ({self.failure or 'shutting down'})", fix="restart the engine")

    def _fail_all(self, reason: str) -> None:
        with self._changed:
            failed = self._running + self._waiting
            self._running, self._waiting = [], []
            self._changed.notify_all()
        for job in failed:
            with contextlib.suppress(InvalidStateError):
                job.future.set_exception(EngineError(reason))
