"""Where batches come from: the hub, under leases that are renewed for as long as the trainer works."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import Protocol

import httpx
import msgspec

from treadle.clock import awake_s
from treadle.errors import DiskFull, HubError
from treadle.log import get_logger
from treadle.net.tokens import HUB_TOKEN_VARIABLE, bearer_headers
from treadle.net.urls import is_loopback, shown_url
from treadle.watch.waits import Wait, Waits, Wanted
from treadle.wire import binary
from treadle.wire.groups import LeasedBatch
from treadle.wire.hub import LeaseRequest, LeaseUpdate, RegisterTrainer

log = get_logger("feed")

HOLDER = "trainer"
POLL_S = 2.0  # how long one call waits at the hub: short enough to notice a request to stop
RENEWALS_PER_LEASE = 4  # some may get lost
DISK_FULL = 507  # the hub's answer when nothing more can be stored: repeating does not help
CONFLICT = 409
PATIENCE_S = 120.0  # a hub that is away for longer is gone
SLOW_ANSWER_S = 10.0
ANSWER_S = 20.0  # then it is asked again; a request to stop is heard between


class Feed(Protocol):
    def lease(self, step: int) -> LeasedBatch: ...

    def lease_ahead(self, step: int) -> None: ...

    def ack(self, batch: LeasedBatch) -> None: ...


class HubFeed:
    """The batch of a step is the same however often it is asked for, until it is acknowledged and after."""

    def __init__(
        self,
        url: str,
        check_stop: Callable[[], None],
        waits: Waits,
        batch_patience_s: float,
        *,
        answer_s: float = ANSWER_S,
    ) -> None:
        self._url = shown_url(url)
        self._no_answer = f"it takes connections, and has not answered within {answer_s:g} s"
        self._look_at_hub = f"see its log, or ask: treadle doctor --hub {self._url}"
        self._waits = waits
        self._patience_s = batch_patience_s
        self._hub = _client(url, answer_s)
        self._check_stop = check_stop
        self._ahead: dict[int, LeasedBatch] = {}
        self._newest = 0  # the last step whose batch was leased
        self._leases = _Leases(_client(url, answer_s))

    def register(self, registration: RegisterTrainer) -> None:
        self._post("/register", registration)

    def lease(self, step: int) -> LeasedBatch:
        """Wait for the batch of `step`."""
        return self._ahead.pop(step, None) or self._lease(step)

    def lease_ahead(self, step: int) -> None:
        """Wait until the batches up to `step` are there, in order, and keep them for `lease`."""
        for wanted in range(self._newest + 1, step + 1):
            self._ahead[wanted] = self._lease(wanted)

    def _lease(self, step: int) -> LeasedBatch:
        """Says in the log why there is no batch when it takes long."""
        reason = ""
        while True:
            # Every change is a beginning: it is late when nothing has happened for too long.
            with self._waits.waiting(self._batch_of(step, reason)):
                batch, reason = self._ask_until_it_changes(step, reason)
            if batch is not None:
                self._newest = step
                self._leases.hold(batch)
                return batch
            log.info("waiting_for_batch", step=step, reason=reason)

    def _ask_until_it_changes(self, step: int, reason: str) -> tuple[LeasedBatch | None, str]:
        request = LeaseRequest(step=step, holder=HOLDER, wait_s=POLL_S)
        while True:
            self._check_stop()
            answer = binary.unpack_answer(self._post("/v1/lease", request, {"Accept": binary.CONTENT_TYPE}))
            if answer.batch is not None or answer.reason != reason:
                return answer.batch, answer.reason

    def _batch_of(self, step: int, reason: str) -> Wanted:
        told = f"the batch of step {step}" + (f" ({reason})" if reason else "")
        return Wanted(told, of="env", deadline_s=self._patience_s)

    def ack(self, batch: LeasedBatch) -> None:
        self._leases.drop(batch.step)
        self._post(f"/v1/batches/{batch.step}/ack", LeaseUpdate(token=batch.token))

    def give_back(self, reason: str, *, counts: bool) -> None:
        """Return what is held, so that nobody waits for a lease to run out; `counts`: as a delivery that failed.

        A courtesy: a hub that does not answer now takes the leases back by itself.
        """
        for number, batch in enumerate(self._leases.drop_all()):
            # What was leased ahead was not touched: only the oldest can be the one that failed.
            update = LeaseUpdate(token=batch.token, reason=reason, counts=counts and number == 0)
            with contextlib.suppress(httpx.HTTPError):
                self._hub.post(f"/v1/batches/{batch.step}/nack", content=msgspec.json.encode(update), timeout=5.0)

    def _post(self, path: str, body: msgspec.Struct, headers: Mapping[str, str] | None = None) -> bytes:
        """Every call here may be repeated without harm, so a hub that restarts is waited for."""
        content = msgspec.json.encode(body)
        answer, problem = self._try(path, content, headers)
        if answer is None:
            wanted = Wanted(f"the hub at {self._url}", fix=_START_HUB, of="hub", deadline_s=PATIENCE_S / 2)
            with self._waits.waiting(wanted) as wait:
                answer = self._try_again(path, content, headers, wait, problem)
        if answer.status_code == CONFLICT:
            raise HubError(f"the hub gave this trainer's batch away: {answer.text[:500]}", fix=_ONE_TRAINER)
        if answer.status_code != 200:
            raise HubError(f"the hub refused {path}: {answer.status_code} {answer.text[:500]}")
        return answer.content

    def _try_again(
        self, path: str, content: bytes, headers: Mapping[str, str] | None, wait: Wait, problem: str
    ) -> httpx.Response:
        deadline = awake_s() + PATIENCE_S
        while True:
            wait.problem = problem
            wait.fix = self._look_at_hub if problem == self._no_answer else _START_HUB
            if awake_s() > deadline:
                raise HubError(f"the hub at {self._url} does not serve {path}: {problem}", fix=self._look_at_hub)
            self._check_stop()
            time.sleep(0.5)
            answer, problem = self._try(path, content, headers)
            if answer is not None:
                return answer

    def _try(self, path: str, content: bytes, headers: Mapping[str, str] | None) -> tuple[httpx.Response | None, str]:
        """An answer that will not change, or what keeps the hub from giving one."""
        slow = Wanted(f"the hub at {self._url} to answer {path}", of="hub", deadline_s=SLOW_ANSWER_S)
        try:
            with self._waits.waiting(slow):
                answer = self._hub.post(path, content=content, headers=headers)
        except httpx.ReadTimeout:
            return None, self._no_answer
        except httpx.TransportError as error:
            return None, repr(error)
        if answer.status_code == DISK_FULL:
            raise DiskFull("the hub's disk is full", fix="free some space and continue with --resume")
        if answer.status_code >= 500:
            return None, f"{answer.status_code} {answer.text[:200]}"
        return answer, ""


class _Leases:
    """Renews what is held from a thread of its own: a step may take longer than a lease.

    A renewal that fails is not an error here. The acknowledgement tells whether the batch is still ours.
    """

    def __init__(self, hub: httpx.Client) -> None:
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
            self._thread = threading.Thread(target=self._renew_for_ever, name="lease-renewal", daemon=True)
            self._thread.start()

    def drop(self, step: int) -> None:
        with self._lock:
            self._held.pop(step, None)

    def drop_all(self) -> list[LeasedBatch]:
        """What was held, the oldest first."""
        with self._lock:
            held = [self._held[step] for step in sorted(self._held)]
            self._held.clear()
        return held

    def _renew_for_ever(self) -> None:
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
            answer = self._hub.post(f"/v1/batches/{batch.step}/renew", content=content)
        except httpx.HTTPError as error:
            log.warning("renewal_failed", step=batch.step, problem=repr(error))
        else:
            if answer.status_code != 200:
                log.warning("renewal_refused", step=batch.step, status=answer.status_code, hub_says=answer.text[:200])


_START_HUB = "start it with `treadle hub`, or name another with --hub-url"
_ONE_TRAINER = "let one trainer at a time work on a hub: stop the other one, and continue with --resume"


def _client(url: str, answer_s: float) -> httpx.Client:
    headers = {"Treadle-Holder": HOLDER, "Content-Type": "application/json"}
    headers |= bearer_headers(os.environ.get(HUB_TOKEN_VARIABLE))
    local = is_loopback(url)
    if local:
        headers["Accept-Encoding"] = "identity"  # to compress costs more than to copy
    return httpx.Client(base_url=url, timeout=answer_s, headers=headers, trust_env=not local)
