"""Schedule requests on the generation thread, which owns the model runner, and hold it while weights change.

submit() ──> waiting ──(room, not held, wave complete)──> running ──> result
                                                             |
                                            one token per step; tasks run between steps

hold("keep")   stop admitting and sampling; running requests stay in the batch
hold("wait")   stop admitting; returns when no request runs
hold("abort")  like "keep", and running requests end with the tokens they have
release(v)     resume; with a version, the weights have changed and caches are recomputed
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from functools import partial
from typing import Any, TypeVar

from treadle.background import complete
from treadle.engines.interface import Adapter, GenerationResult, HoldMode, Request, ServingStatus
from treadle.engines.model_runner import ModelRunner
from treadle.engines.request_queue import OnDeltas, QueuedRequest, RequestQueue
from treadle.errors import EngineError, RequestError
from treadle.faults import reach
from treadle.log import get_logger

log = get_logger("engine")
T = TypeVar("T")


_Task = tuple[Future[Any], Callable[[], Any]]  # a function that the generation thread runs between two tokens


class Scheduler:
    def __init__(
        self, runner: ModelRunner, max_num_seqs: int, *, on_failure: Callable[[], None] = lambda: None
    ) -> None:
        self.runner = runner
        self.max_num_seqs = max_num_seqs
        self._on_failure = on_failure
        self._changed = threading.Condition()
        self._waiting = RequestQueue()
        self._running: list[QueuedRequest] = []
        self._tasks: list[_Task] = []
        self._hold: HoldMode | None = None
        self._held_at: float | None = None  # start of the hold; None: not held
        self._is_stale = False  # the weights changed: running requests must be recomputed
        self._has_cancelled = False
        self._closed = False
        self.adapters: dict[str, Adapter] = {}
        self._policy_adapter: str | None = None  # serves requests that name no adapter
        self._active_adapter: str | None = None  # the one the model computes with now
        self.failure: str | None = None  # set when the generation thread has died; /health reports it
        self._base_version = 0  # of the model's own weights
        self._generated_tokens = 0
        self._generating_s = 0.0
        self._num_steps = 0
        self._thread = threading.Thread(target=self._loop, name="generation", daemon=True)
        self._thread.start()

    @property
    def policy_version(self) -> int:
        """Version that requests without an adapter are served by."""
        return self._version_of(self._policy_adapter)

    @property
    def policy_adapter(self) -> Adapter | None:
        """The adapter of requests that name none; None: the base model."""
        return None if self._policy_adapter is None else self.adapters.get(self._policy_adapter)

    # Called from any thread

    def status(self) -> ServingStatus:
        return ServingStatus(
            policy_version=self.policy_version,
            is_held=self._hold is not None,
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            generated_tokens=self._generated_tokens,
            generating_s=self._generating_s,
            progress_count=self._num_steps,
            failure=self.failure,
        )

    def submit(self, request: Request, on_deltas: OnDeltas | None = None) -> Future[GenerationResult]:
        """Queue a request. Cancelling the returned future removes it from the queue or the batch."""
        job = QueuedRequest(request, on_deltas)
        job.future.add_done_callback(lambda future: self._note_cancelled() if future.cancelled() else None)
        with self._changed:
            self._check_alive()
            if request.adapter is not None and request.adapter not in self.adapters:
                raise RequestError(f"there is no adapter '{request.adapter}'", fix="GET /v1/models lists what there is")
            self._waiting.append(job)
            self._changed.notify_all()
        return job.future

    def between_tokens(self, work: Callable[[], T]) -> Future[T]:
        """Run `work` on the generation thread between two tokens, whether held or not."""
        future = Future[T]()
        with self._changed:
            self._check_alive()
            self._tasks.append((future, work))
            self._changed.notify_all()
        return future

    def hold(self, mode: HoldMode, timeout_s: float) -> None:
        """No token is sampled once this returns. On a timeout the previous state is restored.

        An engine that is frozen already stays frozen in every mode: its weights may be half written.
        """
        with self._changed:
            self._check_alive()
            before = self._hold
            if before is None or mode != "wait":
                self._hold = "wait" if mode == "wait" else "keep"
            self._changed.notify_all()
        is_held_now = mode == "wait" or self._freeze(mode, timeout_s)
        with self._changed:
            if mode == "wait":
                is_held_now = self._changed.wait_for(lambda: not self._running or self._hold == "keep", timeout_s)
            if not is_held_now:
                self._hold = before
                self._changed.notify_all()
                raise EngineError(f"{len(self._running)} requests were still running after {timeout_s:.0f} s")
            self._check_alive()
            if self._hold is None:
                raise EngineError("another call let the engine go while this one waited", fix="pause it again")
            self._held_at = self._held_at or time.monotonic()  # a second hold counts from the first
        self.runner.synchronize()

    def release(self, policy_version: int | None) -> float:
        """Resume; returns the seconds held. A new version, after the weights changed, requires a hold."""
        if policy_version is not None:
            self.between_tokens(partial(self.weights_changed, policy_version, must_be_held=True)).result()
        with self._changed:
            held_at, self._held_at = self._held_at, None
            self._hold = None
            self._changed.notify_all()
            return 0.0 if held_at is None else time.monotonic() - held_at

    def add_adapter(self, adapter: Adapter) -> None:
        """Make an adapter available; one with a policy version also serves requests that name none."""
        with self._changed:
            self.adapters[adapter.name] = adapter
            if adapter.policy_version is not None:
                self._policy_adapter = adapter.name

    def remove_adapter(self, name: str, timeout_s: float) -> None:
        """Make an adapter unavailable; returns when no request runs with it."""
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
        """End after the current token; waiting requests fail with an error."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def join(self) -> None:
        self._thread.join(timeout=5)

    # Run on the generation thread, as tasks

    def weights_changed(self, policy_version: int, *, must_be_held: bool = False) -> None:
        if must_be_held:
            self.check_held()
        self._base_version = policy_version
        self._is_stale = True

    def check_held(self) -> None:
        if self._hold is None or (self._hold == "wait" and self._running):
            raise EngineError("weights may change only while the engine is paused", fix="POST /bridge/pause first")

    def hold_now(self) -> None:
        """Hold from this task on, until `release`. A running wave is aborted; `hold` would let it finish."""
        with self._changed:
            self._hold, self._held_at = "keep", self._held_at or time.monotonic()
        if self._runs_wave():
            self._abort_running()

    def replace_runner(self, runner: ModelRunner, policy_version: int) -> None:
        """Continue running requests on another runner, which has no adapters yet."""
        runner.take_over(self.runner)
        self.runner = runner
        self.adapters.clear()
        self._policy_adapter = self._active_adapter = None
        self.weights_changed(policy_version)

    def move_running_to(self, adapter: str) -> None:
        """Continue running requests with this adapter."""
        for job in self._running:
            job.adapter = adapter
        self._use(adapter)

    def drop_adapter(self, name: str) -> None:
        """Delete an adapter that no request uses any more (after `remove_adapter`)."""
        if self._active_adapter == name:
            self._use(None)
        self.runner.adapters.remove(name)

    def _abort_running(self) -> None:
        self.runner.abort(s for job in self._running for s in job.sequences)
        self._answer()

    # The generation thread

    def _loop(self) -> None:
        while True:
            with self._changed:
                tasks, admitted = self._wait_for_work()
            if self._closed:
                self._fail_all("the engine is shutting down", [*tasks, *self._tasks])
                return
            for future, work in tasks:
                if future.set_running_or_notify_cancel():
                    complete(future, work)
            if tasks:
                continue
            started = time.monotonic()
            try:
                reach("engine:step")
                self._advance(admitted)
            except BaseException as error:  # of any type: clients would wait forever for a thread that has ended
                log.error("generation_failed", exc_info=True)
                self.failure = type(error).__name__
                self._fail_all(f"generation failed ({self.failure}); the engine's log says more", self._tasks)
                self._on_failure()
                return
            self._generating_s += time.monotonic() - started
            self._num_steps += 1

    def _wait_for_work(self) -> tuple[list[_Task], list[QueuedRequest]]:
        """Sleep until there is a task, or a request runs or can be admitted (called with the lock held)."""
        while not self._closed:
            self._drop_cancelled()
            if self._tasks:
                tasks, self._tasks = self._tasks, []
                return tasks, []
            admitted = self._admit() if self._waiting and self._hold is None else []
            if admitted or (self._running and (self._hold != "keep" or self._runs_wave())):
                return [], admitted
            # Wake up now and then: an incomplete wave is admitted after WAVE_TIMEOUT_S.
            self._changed.wait(0.5 if self._waiting and self._hold is None else None)
        return [], []

    def _admit(self) -> list[QueuedRequest]:
        """Admit what fits. A batch has one adapter: a request for another waits until the batch has finished."""

        def may_join(job: QueuedRequest, chosen: list[QueuedRequest]) -> bool:
            if self._running:
                return self._adapter_for(job) == self._running[0].adapter
            return not chosen or self._adapter_for(job) == self._adapter_for(chosen[0])

        admitted = self._waiting.take(self.max_num_seqs - self.runner.num_running, may_join)
        for job in admitted:
            job.admitted = time.monotonic()
            job.adapter = self._adapter_for(job)
            job.policy_version = self._version_of(job.adapter)  # under the lock: it may be unloaded at any moment
        self._running += admitted
        return admitted

    def _adapter_for(self, job: QueuedRequest) -> str | None:
        return job.request.adapter or self._policy_adapter

    def _advance(self, admitted: list[QueuedRequest]) -> None:
        """Prefill admitted requests, and sample one token for all running ones."""
        if self._is_stale:
            self._is_stale = False
            self.runner.recompute(self.policy_version)
        if admitted:
            self._begin(admitted)
        self.runner.step()
        self._answer()

    def _begin(self, admitted: list[QueuedRequest]) -> None:
        adapter = admitted[0].adapter
        if adapter != self._active_adapter:
            self._use(adapter)
        for job in admitted:
            if job.request.num_prompt_top is not None:
                job.prompt_tops = self.runner.prompt_tops(job.request.prompt_ids, job.request.num_prompt_top)
        at_once = [job for job in admitted if job.is_single_token]
        for jobs, begin in (
            (at_once, self.runner.generate_single_tokens),
            ([job for job in admitted if job not in at_once], self.runner.admit),
        ):
            if jobs:
                streamed = [index for index, job in enumerate(jobs) if job.on_deltas is not None]
                begun = begin([job.request for job in jobs], admitted[0].policy_version, streamed=streamed)
                for job, sequences in zip(jobs, begun, strict=True):
                    job.sequences, job.num_sent = sequences, [0] * len(sequences)

    def _use(self, adapter: str | None) -> None:
        self.runner.adapters.use(adapter)
        self._active_adapter = adapter

    def _version_of(self, adapter: str | None) -> int:
        named = self.adapters.get(adapter) if adapter is not None else None
        return self._base_version if named is None or named.policy_version is None else named.policy_version

    def _drop_cancelled(self) -> None:
        """Remove requests whose client has gone (called with the lock held)."""
        if not self._has_cancelled:
            return
        self._has_cancelled = False
        self._waiting.drop(lambda job: job.future.cancelled())
        gone = [job for job in self._running if job.future.cancelled()]
        if gone:
            self.runner.abort(s for job in gone for s in job.sequences)
            self._running = [job for job in self._running if job not in gone]
            self._changed.notify_all()

    def _answer(self) -> None:
        """Send new tokens of streamed requests, and the results of finished ones."""
        for job in self._running:
            if job.on_deltas is not None:
                job.on_deltas(job.take_deltas())
        done = [job for job in self._running if all(s.finish_reason for s in job.sequences)]
        if not done:
            return
        with self._changed:
            self._running = [job for job in self._running if job not in done]
            self._changed.notify_all()
        for job in done:
            self._generated_tokens += sum(len(s.token_ids) for s in job.sequences)
            seconds = time.monotonic() - job.admitted
            with contextlib.suppress(InvalidStateError):  # cancelled by its client
                job.future.set_result(GenerationResult(list(job.sequences), job.prompt_tops, seconds))

    # Waiting for the generation thread

    def _freeze(self, mode: HoldMode, timeout_s: float) -> bool:
        """Wait until the generation thread has seen the hold: once a task has run, it samples no further token.

        A wave is finished first. It must give the same tokens for the same seed, which weights that change at some
        moment in the middle would break.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            if mode == "keep" and not self._changed.wait_for(lambda: not self._runs_wave(), timeout_s):
                return False
        task = self.between_tokens(self._abort_running if mode == "abort" else lambda: None)
        try:
            task.result(max(0.0, deadline - time.monotonic()))
        except TimeoutError:
            return not task.cancel()  # False from cancel(): it has started after all
        return True

    def _runs_wave(self) -> bool:
        return any(job.request.wave is not None for job in self._running)

    def _note_cancelled(self) -> None:
        with self._changed:
            self._has_cancelled = True
            self._changed.notify_all()

    def _check_alive(self) -> None:
        if self._closed or self.failure is not None:
            raise EngineError(f"generation has ended ({self.failure or 'shutting down'})", fix="restart the engine")

    def _fail_all(self, reason: str, tasks: list[_Task]) -> None:
        with self._changed:
            failed = self._running + self._waiting.drop(lambda _: True)
            self._running, self._tasks = [], []
            self._closed = True
            self._changed.notify_all()
        for job in failed:
            job.fail(EngineError(reason))
        for future, _ in tasks:
            if future.set_running_or_notify_cancel():
                future.set_exception(EngineError(reason))
