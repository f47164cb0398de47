"""Get batches from the hub under leases that are renewed while the trainer works.

With several ranks, rank 0 talks to the hub and shares each batch with the others (SharedFeed), so the loop runs on
every rank as if it were alone.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import Protocol

import msgspec

from treadle.errors import HubError
from treadle.log import get_logger
from treadle.net.access_tokens import HUB_TOKEN_VARIABLE, bearer_headers
from treadle.net.address import is_loopback, shown_url
from treadle.net.client import OK, BlockingHttpClient, Failure, HttpAnswer, NoAnswer, Retries, RetryPolicy
from treadle.train.ranks import Ranks
from treadle.train.stop import StopRequested
from treadle.train.teacher import Teacher
from treadle.watch.waits import Wait, Waits, WaitSpec
from treadle.wire.groups import BINARY_TYPE, LeasedBatch, pack_batch, unpack_answer, unpack_batch
from treadle.wire.hub import LeaseRequest, LeaseUpdate, RegisterTrainer

log = get_logger("feed")

HOLDER = "trainer"
POLL_S = 2.0  # a lease request waits this long at the hub: short enough to notice a stop
LOOK_AHEAD_EVERY_S = 1.0
RENEWALS_PER_LEASE = 4  # some may fail
CONFLICT = 409
PATIENCE_S = 120.0  # then an unreachable hub is an error
RETRIES = RetryPolicy(give_up_after_s=PATIENCE_S, longest_pause_s=0.5)  # a stop is noticed in between
SLOW_ANSWER_S = 10.0
BATCH_LATE_S = 900.0  # without the next batch the watchdog reports the environment
ANSWER_S = 20.0  # then the request is repeated
START_HUB = "start it with `treadle hub`, or name another with --hub-url"
ONE_TRAINER = "let one trainer at a time work on a hub: stop the other one, and continue with --resume"
DONE, WAITING, STOPPED, ASIDE = b"d", b"w", b"s", b"a"  # first byte of rank 0's messages about the feed
PHASE = "waiting for a batch"


class HubFeed:
    """The batch of a step is the same on every request, before and after it is acknowledged."""

    def __init__(
        self,
        url: str,
        check_stop: Callable[[], None],
        waits: Waits,
        *,
        teacher: Teacher | None = None,
        answer_s: float = ANSWER_S,
    ) -> None:
        """`teacher`: scores every batch, from the moment it is leased."""
        self._teacher = teacher
        self._url = shown_url(url)
        self._look_at_hub = f"see its log, or ask: treadle doctor --hub {self._url}"
        self._waits = waits
        self._hub = _client(url, answer_s)
        self._check_stop = check_stop
        self._ahead: dict[int, LeasedBatch] = {}
        self._newest = 0  # the last step whose batch was leased
        self._next_look_s = 0.0
        self._leases = _Leases(_client(url, answer_s))

    def register(self, registration: RegisterTrainer) -> None:
        self._post("/register", registration)

    def lease(self, step: int) -> LeasedBatch:
        """Wait for the batch of `step`, and for the teacher to score it."""
        batch = self._ahead.pop(step, None) or self._lease(step)
        if self._teacher is not None:
            self._teacher.finish(batch, self._check_stop)
        return batch

    def lease_ahead(self, step: int) -> None:
        """Wait for all batches up to `step`, in order, and keep them for `lease`."""
        for wanted in range(self._newest + 1, step + 1):
            self._ahead[wanted] = self._lease(wanted)

    def look_ahead(self, step: int) -> None:
        """With a teacher: lease the next batch if it is there, so that the teacher scores it during this step. Does not
        wait; called often."""
        now_s = time.monotonic()
        if self._teacher is None or step != self._newest + 1 or now_s < self._next_look_s:
            return
        self._next_look_s = now_s + LOOK_AHEAD_EVERY_S
        request = msgspec.json.encode(LeaseRequest(step=step, holder=HOLDER, wait_s=0.0))
        outcome = self._try("/v1/lease", request, {"Accept": BINARY_TYPE})
        if isinstance(outcome, Failure) or outcome.status != OK:  # `lease` asks again, and reports it
            self._next_look_s = now_s + PATIENCE_S
        elif (batch := unpack_answer(outcome.content).batch) is not None:
            self._ahead[step] = self._take(batch)

    def _take(self, batch: LeasedBatch) -> LeasedBatch:
        """Hold a batch that was leased, and let the teacher begin."""
        self._newest = batch.step
        self._leases.hold(batch)
        if self._teacher is not None:
            self._teacher.start(batch)
        return batch

    def _lease(self, step: int) -> LeasedBatch:
        """Log why there is no batch yet."""
        reason = ""
        while True:
            what = f"the batch of step {step}" + (f" ({reason})" if reason else "")
            # The deadline starts again when the reason changes.
            with self._waits.waiting(WaitSpec(what, of="env", deadline_s=BATCH_LATE_S)):
                batch, reason = self._poll(step, reason)
            if batch is not None:
                return self._take(batch)
            log.info("waiting_for_batch", step=step, reason=reason)

    def _poll(self, step: int, reason: str) -> tuple[LeasedBatch | None, str]:
        """Ask until there is a batch or another reason."""
        request = LeaseRequest(step=step, holder=HOLDER, wait_s=POLL_S)
        while True:
            self._check_stop()
            answer = unpack_answer(self._post("/v1/lease", request, {"Accept": BINARY_TYPE}))
            if answer.batch is not None or answer.reason != reason:
                return answer.batch, answer.reason

    def ack(self, batch: LeasedBatch) -> None:
        self._leases.drop(batch.step)
        self._post(f"/v1/batches/{batch.step}/ack", LeaseUpdate(token=batch.token))

    def give_back(self, reason: str, *, counts: bool) -> None:
        """Return leased batches to the hub before their leases expire; `counts`: as a failed delivery.

        Errors are ignored: the leases expire anyway.
        """
        for number, batch in enumerate(self._leases.drop_all()):
            # Only the oldest batch was worked on.
            update = LeaseUpdate(token=batch.token, reason=reason, counts=counts and number == 0)
            with contextlib.suppress(NoAnswer):
                path = f"/v1/batches/{batch.step}/nack"
                self._hub.request("POST", path, body=msgspec.json.encode(update), timeout_s=5.0)

    def _post(self, path: str, body: msgspec.Struct, headers: Mapping[str, str] | None = None) -> bytes:
        """All requests are idempotent, so a hub that restarts is waited for."""
        content = msgspec.json.encode(body)
        answer = self._try(path, content, headers)
        if isinstance(answer, Failure):
            wanted = WaitSpec(f"the hub at {self._url}", fix=START_HUB, of="hub", deadline_s=PATIENCE_S / 2)
            with self._waits.waiting(wanted) as wait:
                answer = self._try_again(path, content, headers, wait, answer)
        if answer.status == CONFLICT:
            raise HubError(f"the hub gave this trainer's batch away: {answer.message}", fix=ONE_TRAINER)
        if answer.status != OK:
            raise HubError(f"the hub refused {path}: {answer.status} {answer.message}")
        return answer.content

    def _try_again(
        self, path: str, content: bytes, headers: Mapping[str, str] | None, wait: Wait, failure: Failure
    ) -> HttpAnswer:
        retries = Retries(RETRIES)
        while True:
            wait.problem = failure.problem
            wait.fix = self._look_at_hub if failure.is_late else START_HUB
            pause_s = retries.pause_s(failure)
            if pause_s is None:
                raise HubError(
                    f"the hub at {self._url} does not serve {path}: {failure.problem}", fix=self._look_at_hub
                )
            until = time.monotonic() + pause_s
            while (left_s := until - time.monotonic()) > 0:  # Retry-After may be long
                self._check_stop()
                time.sleep(min(left_s, RETRIES.longest_pause_s))
            outcome = self._try(path, content, headers)
            if isinstance(outcome, HttpAnswer):
                return outcome
            failure = outcome

    def _try(self, path: str, content: bytes, headers: Mapping[str, str] | None) -> HttpAnswer | Failure:
        slow = WaitSpec(f"the hub at {self._url} to answer {path}", of="hub", deadline_s=SLOW_ANSWER_S)
        try:
            with self._waits.waiting(slow):
                outcome: HttpAnswer | NoAnswer = self._hub.request("POST", path, body=content, headers=headers)
        except NoAnswer as error:
            outcome = error
        return RETRIES.check(outcome, "hub")


class _Leases:
    """Renews leases in a thread: a step may take longer than a lease.

    A failed renewal is not an error. The acknowledgement shows whether the lease was lost.
    """

    def __init__(self, hub: BlockingHttpClient) -> None:
        self._hub = hub
        self._held: dict[int, LeasedBatch] = {}
        self._lock = threading.Lock()
        self._changed = threading.Event()
        self._thread: threading.Thread | None = None

    def hold(self, batch: LeasedBatch) -> None:
        with self._lock:
            self._held[batch.step] = batch
        self._changed.set()
        if self._thread is None:
            self._thread = threading.Thread(target=self._renew_forever, name="lease-renewal", daemon=True)
            self._thread.start()

    def drop(self, step: int) -> None:
        with self._lock:
            self._held.pop(step, None)

    def drop_all(self) -> list[LeasedBatch]:
        """The batches that were held, oldest first."""
        with self._lock:
            held = [self._held[step] for step in sorted(self._held)]
            self._held.clear()
        return held

    def _renew_forever(self) -> None:
        while True:
            with self._lock:
                held = list(self._held.values())
            if not held:
                self._changed.wait()
                self._changed.clear()
                continue
            time.sleep(min(batch.lease_s for batch in held) / RENEWALS_PER_LEASE)
            for batch in held:
                with self._lock:
                    is_held = self._held.get(batch.step) is batch
                if is_held:
                    self._renew(batch)

    def _renew(self, batch: LeasedBatch) -> None:
        try:
            content = msgspec.json.encode(LeaseUpdate(token=batch.token))
            answer = self._hub.request("POST", f"/v1/batches/{batch.step}/renew", body=content)
        except NoAnswer as error:
            log.warning("renewal_failed", step=batch.step, problem=str(error))
        else:
            if answer.status != OK:
                log.warning("renewal_refused", step=batch.step, status=answer.status, hub_says=answer.message[:200])


def _client(url: str, answer_s: float) -> BlockingHttpClient:
    headers = {"Treadle-Holder": HOLDER, "Content-Type": "application/json"}
    headers |= bearer_headers(os.environ.get(HUB_TOKEN_VARIABLE))
    return BlockingHttpClient(url, headers=headers, timeout_s=answer_s, trust_env=not is_loopback(url))


# ---- several ranks

OpenHub = Callable[[Callable[[], None]], HubFeed]  # gets a function to call while it waits


class Aside(Protocol):
    """Work of all ranks that can come up while rank 0 waits for a batch."""

    def due(self) -> Callable[[], None] | None:
        """Rank 0's part, if there is something to do."""

    def take_part(self) -> None:
        """The part of the other ranks."""


def open_feed(ranks: Ranks, check_stop: Callable[[], None], aside: Aside, open_hub: OpenHub) -> HubFeed | SharedFeed:
    def check() -> None:
        check_stop()
        if (work := aside.due()) is not None:
            work()

    return open_hub(check) if ranks.size == 1 else SharedFeed(ranks, check_stop, aside, open_hub)


class SharedFeed:
    """Rank 0 leases batches and sends them to the other ranks, with heartbeats while it waits."""

    def __init__(self, ranks: Ranks, check_stop: Callable[[], None], aside: Aside, open_hub: OpenHub) -> None:
        self._ranks = ranks
        self._check_stop = check_stop
        self._aside = aside
        self._hub = open_hub(self._check) if ranks.leads else None
        self._is_waiting = False
        self._last_heartbeat = 0.0

    def register(self, registration: RegisterTrainer) -> None:
        if self._hub is not None:
            self._hub.register(registration)

    def lease(self, step: int) -> LeasedBatch:
        return unpack_batch(self._share(lambda hub: pack_batch(hub.lease(step))))

    def lease_ahead(self, step: int) -> None:
        # All ranks take part: otherwise the others would time out in their next collective operation.
        self._share(lambda hub: hub.lease_ahead(step))

    def look_ahead(self, step: int) -> None:
        if self._hub is not None:
            self._hub.look_ahead(step)

    def ack(self, batch: LeasedBatch) -> None:
        if self._hub is not None:
            self._hub.ack(batch)

    def give_back(self, reason: str, *, counts: bool) -> None:
        if self._hub is not None:
            self._hub.give_back(reason, counts=counts)

    def _share(self, act: Callable[[HubFeed], bytes | None]) -> bytes:
        """The result of `act` on rank 0, on every rank."""
        if self._hub is None:
            return self._receive()
        self._is_waiting, self._last_heartbeat = True, time.monotonic()
        try:
            result = act(self._hub) or b""
        except StopRequested:
            self._ranks.broadcast(PHASE, STOPPED)
            raise
        finally:
            self._is_waiting = False
        self._ranks.broadcast(PHASE, DONE + result)
        return result

    def _receive(self) -> bytes:
        while True:
            message = self._ranks.broadcast(PHASE)
            kind, content = message[:1], message[1:]
            if kind == STOPPED:
                raise StopRequested
            if kind == DONE:
                return content
            if kind == ASIDE:
                self._aside.take_part()

    def _check(self) -> None:
        self._check_stop()
        if not self._is_waiting:
            return
        if (work := self._aside.due()) is not None:
            self._ranks.broadcast(PHASE, ASIDE)
            work()
        elif time.monotonic() - self._last_heartbeat > self._ranks.heartbeat_s:
            self._ranks.broadcast(PHASE, WAITING)
        else:
            return
        self._last_heartbeat = time.monotonic()
