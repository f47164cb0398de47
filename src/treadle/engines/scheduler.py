"""Who is generated when: one thread that owns the engine, and holds between versions.

submit() ──> waiting ──(room, not held, wave complete)──> running ──> answer
                                                             |
                                              one token at a time; errands in between

hold("keep")   nothing is admitted, nothing is sampled; what runs stays where it is
hold("wait")   nothing is admitted; returns when nothing runs
hold("abort")  as "keep", and what runs is answered with what it has
release(v)     the line moves again; with a version: under weights that have changed since
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass
from typing import Any, TypeVar

from treadle.engines.interface import Adapter, Generation, HoldMode, Request
from treadle.engines.model_runner import TransformersEngine
from treadle.engines.request_queue import Job, Tell, WaitingLine
from treadle.errors import EngineError, RequestError
from treadle.faults import reach
from treadle.log import get_logger

log = get_logger("engine")
T = TypeVar("T")


@dataclass(frozen=True)
class _Errand:
    """Something that the generation thread does between two tokens."""

    work: Callable[[], Any]
    future: Future[Any]

    def run(self) -> None:
        if self.future.set_running_or_notify_cancel():
            try:
                self.future.set_result(self.work())
            except BaseException as error:  # it belongs to whoever sent the errand
                self.future.set_exception(error)


class Scheduler:
    def __init__(
        self, engine: TransformersEngine, max_num_seqs: int, *, on_failure: Callable[[], None] = lambda: None
    ) -> None:
        self.engine = engine
        self.max_num_seqs = max_num_seqs
        self._on_failure = on_failure
        self._changed = threading.Condition()
        self._waiting = WaitingLine()
        self._running: list[Job] = []
        self._errands: list[_Errand] = []
        self._hold: HoldMode | None = None
        self._held_at: float | None = None  # since when no token is sampled
        self._is_stale = False  # the weights changed under what runs: it must be computed again
        self._has_cancelled = False
        self._closed = False
        self.adapters: dict[str, Adapter] = {}
        self._policy_adapter: str | None = None  # serves requests that name none
        self._active_adapter: str | None = None  # what the model computes with now
        self.failure: str | None = None  # set when the generation thread died: /health must tell
        self._base_version = 0  # of the model's own weights
        self.generated_tokens = 0
        self.generating_s = 0.0
        self.num_steps = 0
        self._thread = threading.Thread(target=self._loop, name="generation", daemon=True)
        self._thread.start()

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def is_held(self) -> bool:
        return self._hold is not None

    @property
    def policy_version(self) -> int:
        """Of what serves requests that name no adapter."""
        return self._version_of(self._policy_adapter)

    @property
    def policy_adapter(self) -> Adapter | None:
        """What serves requests that name none."""
        return None if self._policy_adapter is None else self.adapters.get(self._policy_adapter)

    # Called from any thread

    def submit(self, request: Request, tell: Tell | None = None) -> Future[Generation]:
        """Cancelling what is returned takes the request back: it leaves the line, or the batch."""
        job = Job(request, tell)
        job.future.add_done_callback(lambda future: self._note_cancelled() if future.cancelled() else None)
        with self._changed:
            self._refuse_when_dead()
            if request.adapter is not None and request.adapter not in self.adapters:
                raise RequestError(f"there is no adapter '{request.adapter}'", fix="GET /v1/models lists what there is")
            self._waiting.append(job)
            self._changed.notify_all()
        return job.future

    def between_tokens(self, work: Callable[[], T]) -> Future[T]:
        """Let the generation thread do this as soon as it is between two tokens, held or not."""
        errand = _Errand(work, Future())
        with self._changed:
            self._refuse_when_dead()
            self._errands.append(errand)
            self._changed.notify_all()
        return errand.future

    def hold(self, mode: HoldMode, timeout_s: float) -> None:
        """No token is sampled once this returns. When it takes too long, the engine goes on as before.

        An engine that is frozen already stays so, whatever is asked: its weights may be half written.
        """
        with self._changed:
            self._refuse_when_dead()
            before = self._hold
            if before is None or mode != "wait":
                self._hold = "wait" if mode == "wait" else "keep"
            self._changed.notify_all()
        is_still = self._wait_until_done(timeout_s) if mode == "wait" else self._freeze(mode, timeout_s)
        with self._changed:
            if not is_still:
                self._hold = before
                self._changed.notify_all()
                raise EngineError(f"{len(self._running)} requests were still running after {timeout_s:.0f} s")
            self._refuse_when_dead()
            if self._hold is None:
                raise EngineError("another call let the engine go while this one waited", fix="pause it again")
            self._held_at = self._held_at or time.monotonic()  # held again, it was still from the first time on
        self.engine.settle()

    def release(self, policy_version: int | None) -> float:
        """Go on, under a new version when the weights were changed; that is possible only while held. Seconds that
        it stood still."""
        if policy_version is not None:
            self.between_tokens(lambda: self._adopt(policy_version)).result()
        with self._changed:
            held_at, self._held_at = self._held_at, None
            self._hold = None
            self._changed.notify_all()
            return 0.0 if held_at is None else time.monotonic() - held_at

    def add_adapter(self, adapter: Adapter) -> None:
        """From here on it may be asked for; a version of the policy serves whoever names none."""
        with self._changed:
            self.adapters[adapter.name] = adapter
            if adapter.policy_version is not None:
                self._policy_adapter = adapter.name

    def remove_adapter(self, name: str, timeout_s: float) -> None:
        """It cannot be asked for any more; returns when no request runs with it."""
        with self._changed:
            if self.adapters.pop(name, None) is None:
                raise RequestError(f"there is no adapter '{name}'", fix="GET /lora/status lists what is loaded")
            if self._policy_adapter == name:
                self._policy_adapter = None
            for job in self._waiting.drop(lambda job: job.request.adapter == name):
                job.fail(RequestError(f"the adapter '{name}' was unloaded"))
            if not self._changed.wait_for(lambda: all(job.adapter != name for job in self._running), timeout_s):
                raise EngineError(f"requests still run with the adapter '{name}' after {timeout_s:.0f} s")

    def stop(self) -> None:
        """End after the token that is being computed; whoever waits is told."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def join(self) -> None:
        self._thread.join(timeout=5)

    # Errands

    def weights_changed(self, policy_version: int) -> None:
        self._base_version = policy_version
        self._is_stale = True

    def refuse_unless_still(self) -> None:
        if self._hold is None or (self._hold == "wait" and self._running):
            raise EngineError("weights may change only while the engine is paused", fix="POST /bridge/pause first")

    def stay_still(self) -> None:
        """From this errand on, until it is let go. A wave would be finished first: it ends here instead."""
        with self._changed:
            self._hold, self._held_at = "keep", self._held_at or time.monotonic()
        if self._runs_wave():
            self._abandon_running()

    def replace_engine(self, engine: TransformersEngine, policy_version: int) -> None:
        """What runs goes on in another engine, which has no adapters yet."""
        engine.take_over(self.engine)
        self.engine = engine
        self.adapters.clear()
        self._policy_adapter = self._active_adapter = None
        self.weights_changed(policy_version)

    def go_on_with(self, adapter: str) -> None:
        """What runs is computed with this adapter from here on."""
        for job in self._running:
            job.adapter = adapter
        self._use(adapter)

    def forget_adapter(self, name: str) -> None:
        """After `remove_adapter`: nothing runs with it."""
        if self._active_adapter == name:
            self._use(None)
        self.engine.adapters.remove(name)

    def _adopt(self, policy_version: int) -> None:
        self.refuse_unless_still()
        self.weights_changed(policy_version)

    def _abandon_running(self) -> None:
        self.engine.abandon(s for job in self._running for s in job.sequences)
        self._tell_streams()
        self._answer_finished()

    # The generation thread

    def _loop(self) -> None:
        while True:
            with self._changed:
                errands, admitted = self._wait_for_work()
            if self._closed:
                self._fail_all("the engine is shutting down", [*errands, *self._errands])
                return
            for errand in errands:
                errand.run()
            if errands:
                continue
            started = time.monotonic()
            try:
                reach("engine:step")
                self._advance(admitted)
            except BaseException as error:  # whatever it is: a thread that is gone would be waited for without an end
                log.error("generation_failed", exc_info=True)
                self.failure = type(error).__name__
                self._fail_all(f"generation failed ({self.failure}); the engine's log says more", self._errands)
                self._on_failure()
                return
            self.generating_s += time.monotonic() - started
            self.num_steps += 1

    def _wait_for_work(self) -> tuple[list[_Errand], list[Job]]:
        """Sleep until there is an errand, or something runs or can be admitted (called with the lock held)."""
        while not self._closed:
            self._drop_cancelled()
            if self._errands:
                errands, self._errands = self._errands, []
                return errands, []
            admitted = self._admit() if self._waiting and self._hold is None else []
            if admitted or (self._running and (self._hold != "keep" or self._runs_wave())):
                return [], admitted
            # A wave that waits for its last member must not wait for ever.
            self._changed.wait(0.5 if self._waiting and self._hold is None else None)
        return [], []

    def _admit(self) -> list[Job]:
        """All that runs at once runs with one adapter: a request for another waits until those before it are done."""

        def may_join(job: Job, chosen: list[Job]) -> bool:
            if self._running:
                return self._adapter_for(job) == self._running[0].adapter
            return not chosen or self._adapter_for(job) == self._adapter_for(chosen[0])

        admitted = self._waiting.take(self.max_num_seqs - self.engine.num_running, may_join)
        for job in admitted:
            job.admitted = time.monotonic()
            job.adapter = self._adapter_for(job)
            job.policy_version = self._version_of(job.adapter)  # now: without the lock it may be unloaded at any moment
        self._running += admitted
        return admitted

    def _adapter_for(self, job: Job) -> str | None:
        return job.request.adapter or self._policy_adapter

    def _advance(self, admitted: list[Job]) -> None:
        """Begin what was admitted, and one more token for all that runs."""
        if self._is_stale:
            self._is_stale = False
            self.engine.renew(self.policy_version)
        if admitted:
            self._begin(admitted)
        self.engine.step()
        self._tell_streams()
        self._answer_finished()

    def _begin(self, admitted: list[Job]) -> None:
        adapter = admitted[0].adapter
        if adapter != self._active_adapter:
            self._use(adapter)
        for job in admitted:
            if job.request.num_prompt_top is not None:
                job.prompt_tops = self.engine.prompt_tops(job.request.prompt_ids, job.request.num_prompt_top)
        at_once = [job for job in admitted if job.takes_no_row]
        for jobs, begin in (
            (at_once, self.engine.answer_at_once),
            ([job for job in admitted if job not in at_once], self.engine.admit),
        ):
            if jobs:
                streamed = [place for place, job in enumerate(jobs) if job.tell is not None]
                begun = begin([job.request for job in jobs], admitted[0].policy_version, streamed=streamed)
                for job, sequences in zip(jobs, begun, strict=True):
                    job.sequences, job.num_told = sequences, [0] * len(sequences)

    def _use(self, adapter: str | None) -> None:
        self.engine.adapters.use(adapter)
        self._active_adapter = adapter

    def _version_of(self, adapter: str | None) -> int:
        named = self.adapters.get(adapter) if adapter is not None else None
        return self._base_version if named is None or named.policy_version is None else named.policy_version

    def _drop_cancelled(self) -> None:
        """Take back what nobody waits for any more (called with the lock held)."""
        if not self._has_cancelled:
            return
        self._has_cancelled = False
        self._waiting.drop(lambda job: job.future.cancelled())
        gone = [job for job in self._running if job.future.cancelled()]
        if gone:
            self.engine.abandon(s for job in gone for s in job.sequences)
            self._running = [job for job in self._running if job not in gone]
            self._changed.notify_all()

    def _tell_streams(self) -> None:
        for job in self._running:
            if job.tell is not None:
                job.tell(job.news())

    def _answer_finished(self) -> None:
        done = [job for job in self._running if job.is_done]
        if not done:
            return
        with self._changed:
            self._running = [job for job in self._running if job not in done]
            self._changed.notify_all()
        for job in done:
            self.generated_tokens += sum(len(s.token_ids) for s in job.sequences)
            seconds = time.monotonic() - job.admitted
            with contextlib.suppress(InvalidStateError):  # its client has left
                job.future.set_result(Generation(list(job.sequences), job.prompt_tops, seconds))

    # Waiting for it

    def _wait_until_done(self, timeout_s: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: not self._running or self._hold == "keep", timeout_s)

    def _freeze(self, mode: HoldMode, timeout_s: float) -> bool:
        """Once an errand has been run, the thread has seen the hold: it samples no further token.

        A wave is finished first. It promises the same tokens for the same seed; under weights that change at some
        moment of it, which another run would not hit again, it could not.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            if mode == "keep" and not self._changed.wait_for(lambda: not self._runs_wave(), timeout_s):
                return False
        errand = self.between_tokens(self._abandon_running if mode == "abort" else lambda: None)
        try:
            errand.result(max(0.0, deadline - time.monotonic()))
        except TimeoutError:
            return not errand.cancel()  # it was begun at the last moment
        return True

    def _runs_wave(self) -> bool:
        return any(job.request.wave is not None for job in self._running)

    def _note_cancelled(self) -> None:
        with self._changed:
            self._has_cancelled = True
            self._changed.notify_all()

    def _refuse_when_dead(self) -> None:
        if self._closed or self.failure is not None:
            raise EngineError(f"generation has ended ({self.failure or 'shutting down'})", fix="restart the engine")

    def _fail_all(self, reason: str, errands: list[_Errand]) -> None:
        with self._changed:
            failed = self._running + self._waiting.drop(lambda _: True)
            self._running, self._errands = [], []
            self._closed = True
            self._changed.notify_all()
        for job in failed:
            job.fail(EngineError(reason))
        for errand in errands:
            if errand.future.set_running_or_notify_cancel():
                errand.future.set_exception(EngineError(reason))
