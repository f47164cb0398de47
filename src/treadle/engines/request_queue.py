"""Queue requests for generation: first come, first served, with the requests of a wave admitted together."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field

from treadle.engines.interface import CompletionDelta, GenerationResult, Request
from treadle.engines.model_runner import Sequence
from treadle.errors import EngineError
from treadle.log import get_logger
from treadle.wire.generate import Wave

log = get_logger("engine")
WAVE_TIMEOUT_S = 10.0  # an incomplete wave is generated without its missing requests after this time
MAX_PARTIAL_WAVES = 1024  # partially admitted waves that are tracked; the oldest are dropped

OnDeltas = Callable[[list[CompletionDelta]], None]


@dataclass(eq=False)
class QueuedRequest:
    """A request that waits or runs, and its result."""

    request: Request
    on_deltas: OnDeltas | None  # called after every token of a streamed request
    submitted: float = field(default_factory=time.monotonic)
    future: Future[GenerationResult] = field(default_factory=Future)
    sequences: list[Sequence] = field(default_factory=list)
    num_sent: list[int] = field(default_factory=list)
    prompt_tops: list[dict[int, float]] | None = None
    admitted: float = 0.0
    adapter: str | None = None  # set at admission, like policy_version
    policy_version: int = 0

    @property
    def is_single_token(self) -> bool:
        """Whether the prefill alone answers it, so that it takes no row of the batch."""
        return self.request.max_tokens == 1 and self.request.wave is None

    def take_deltas(self) -> list[CompletionDelta]:
        """What was sampled since the last call, the end of a sequence included."""
        deltas = []
        for index, s in enumerate(self.sequences):
            start, end = self.num_sent[index], len(s.token_ids) + (s.finish_reason is not None)
            if end == start:
                continue
            self.num_sent[index] = end
            deltas.append(
                CompletionDelta(
                    index=index,
                    token_ids=s.token_ids[start:],
                    logprobs=s.logprobs[start:],
                    tops=s.tops[start:],
                    text=s.detokenizer.take_new_text(is_finished=s.finish_reason is not None) if s.detokenizer else "",
                    finish_reason=s.finish_reason,
                    policy_version=s.policy_versions[-1],
                )
            )
        return deltas

    def fail(self, error: EngineError) -> None:
        with contextlib.suppress(InvalidStateError):  # its client has left
            self.future.set_exception(error)


class RequestQueue:
    """Not thread-safe: the scheduler's lock protects it."""

    def __init__(self) -> None:
        self._jobs: list[QueuedRequest] = []
        self._admitted_of_wave: dict[str, int] = {}  # number of admitted requests of partially admitted waves

    def __len__(self) -> int:
        return len(self._jobs)

    def append(self, job: QueuedRequest) -> None:
        """Replaces an older request for the same index of the same wave: its client was killed and restarted."""
        if (wave := job.request.wave) is not None:
            slot = (wave.id, wave.index)
            for old in self.drop(lambda other: (w := other.request.wave) is not None and (w.id, w.index) == slot):
                old.fail(EngineError("replaced by a newer request of the same wave"))
        self._jobs.append(job)

    def drop(self, is_unwanted: Callable[[QueuedRequest], bool]) -> list[QueuedRequest]:
        """Remove and return these requests."""
        dropped = [job for job in self._jobs if is_unwanted(job)]
        if dropped:
            self._jobs = [job for job in self._jobs if job not in dropped]
        return dropped

    def take(self, room: int, may_join: Callable[[QueuedRequest, list[QueuedRequest]], bool]) -> list[QueuedRequest]:
        """Take the next requests with at most `room` completions in total.

        Requests of a wave are ordered by index, so that arrival order does not change the batch. The first request
        that may not join those before it ends the search: none is overtaken.
        """
        # Single-token requests need no row and wait for none: a trainer's canary must not queue behind rollouts.
        chosen = [job for job in self._jobs if job.is_single_token and may_join(job, [])]
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

    def _in_order(self) -> list[QueuedRequest]:
        arrival: dict[str, float] = {}
        for job in self._jobs:
            if job.request.wave is not None:
                arrival.setdefault(job.request.wave.id, job.submitted)

        def order(job: QueuedRequest) -> tuple[float, int]:
            wave = job.request.wave
            return (arrival[wave.id], wave.index) if wave else (job.submitted, 0)

        return sorted(self._jobs, key=order)

    def _is_complete(self, job: QueuedRequest, wave: Wave, present: Counter[str]) -> bool:
        """Whether all requests of the wave have arrived, or the wait for them timed out."""
        if present[wave.id] + self._admitted_of_wave.get(wave.id, 0) >= wave.size:
            return True
        if time.monotonic() - job.submitted < WAVE_TIMEOUT_S:
            return False
        log.warning("wave_incomplete", wave=wave.id, present=present[wave.id], size=wave.size)
        return True

    def _count(self, wave: Wave | None) -> None:
        if wave is None:
            return
        count = self._admitted_of_wave.pop(wave.id, 0) + 1
        if count < wave.size:
            self._admitted_of_wave[wave.id] = count
        while len(self._admitted_of_wave) > MAX_PARTIAL_WAVES:
            del self._admitted_of_wave[next(iter(self._admitted_of_wave))]
