"""No engine: for training from recorded batches, and for tests of the loop."""

from __future__ import annotations

import time

from treadle.sync.receipt import Publishable, Receipt


class OfflineSync:
    """No engine to feed: the trainer's own live weights are all there is."""

    def publish(self, policy: Publishable, version: int) -> Receipt:
        started = time.monotonic()
        policy.write_live_weights()
        return Receipt(version=version, wait_s=0.0, write_s=time.monotonic() - started)
