"""Where batches come from: the hub, under a lease."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

import httpx
import msgspec

from treadle.errors import DiskFull, HubError
from treadle.log import get_logger
from treadle.wire.groups import LeasedBatch
from treadle.wire.hub import LeaseAnswer, LeaseRequest, LeaseUpdate, RegisterTrainer
from treadle.wire.serving import is_loopback

log = get_logger("feed")

HOLDER = "trainer"
POLL_S = 2.0  # how long one call waits at the hub: short enough to notice a request to stop
DISK_FULL = 507  # the hub's answer when nothing more can be stored: repeating does not help
PATIENCE_S = 120.0  # a hub that is away for longer is gone


class Feed(Protocol):
    def lease(self, step: int) -> LeasedBatch: ...

    def lease_ahead(self, step: int) -> None: ...

    def ack(self, batch: LeasedBatch) -> None: ...


class HubFeed:
    """The batch of a step is the same however often it is asked for, until it is acknowledged and after."""

    def __init__(self, url: str, check_stop: Callable[[], None]) -> None:
        headers = {"Treadle-Holder": HOLDER, "Content-Type": "application/json"}
        self._hub = httpx.Client(base_url=url, timeout=60.0, headers=headers, trust_env=not is_loopback(url))
        self._check_stop = check_stop
        self._ahead: dict[int, LeasedBatch] = {}
        self._newest = 0  # the last step whose batch was leased

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
        request = LeaseRequest(step=step, holder=HOLDER, wait_s=POLL_S)
        while True:
            self._check_stop()
            answer = msgspec.json.decode(self._post("/v1/lease", request), type=LeaseAnswer)
            if answer.batch is not None:
                self._newest = step
                return answer.batch
            if answer.reason != reason:
                reason = answer.reason
                log.info("waiting_for_batch", step=step, reason=reason)

    def ack(self, batch: LeasedBatch) -> None:
        self._post(f"/v1/batches/{batch.step}/ack", LeaseUpdate(token=batch.token))

    def _post(self, path: str, body: msgspec.Struct) -> bytes:
        """Every call here may be repeated without harm, so a hub that restarts is waited for."""
        deadline = time.monotonic() + PATIENCE_S
        content = msgspec.json.encode(body)
        while True:
            try:
                answer = self._hub.post(path, content=content)
                if answer.status_code < 500:
                    break
                if answer.status_code == DISK_FULL:
                    raise DiskFull("the hub's disk is full", fix="free some space and continue with --resume")
                problem = f"{answer.status_code} {answer.text[:200]}"
            except httpx.TransportError as error:
                problem = repr(error)
            if time.monotonic() > deadline:
                raise HubError(f"the hub at {self._hub.base_url} does not serve {path}: {problem}", fix="see its log")
            self._check_stop()
            time.sleep(0.5)
        if answer.status_code != 200:
            raise HubError(f"the hub refused {path}: {answer.status_code} {answer.text[:500]}")
        return answer.content
