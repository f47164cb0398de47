"""Publish at every n-th step only; the engine serves the version before meanwhile."""

from __future__ import annotations

import time

from treadle.sync.receipt import Attached, Publishable, Receipt, SyncMode


class EveryNth:
    """Around a mode: versions that are multiples of `interval`, the first one it sees, and the `last`."""

    def __init__(self, mode: SyncMode, *, interval: int, last: int) -> None:
        self._mode = mode
        self._interval = interval
        self._last = last
        self._served: int | None = None  # nothing yet

    def attach(self) -> Attached:
        return self._mode.attach()

    def settle(self) -> None:
        self._mode.settle()

    def publish(self, policy: Publishable, version: int) -> Receipt:
        if self._served is None or version % self._interval == 0 or version >= self._last:
            receipt = self._mode.publish(policy, version)
            self._served = receipt.version
            return receipt
        self._mode.settle()  # before a step that was sampled under it is counted and saved
        started = time.monotonic()
        policy.write_live_weights()
        return Receipt(version=self._served, wait_s=0.0, write_s=time.monotonic() - started)
