"""The engine, as the trainer waits for it: under the watchdog's eyes."""

from __future__ import annotations

from treadle.config import TrainConfig
from treadle.sync.receipt import Attached, Publishable, Receipt, SyncMode
from treadle.watch.waits import Waits, Wanted

LONG_LOAD_S = 300.0
# A publish ends in an error at its deadline; the stacks are wanted before, while everybody still stands where it hangs.
SHARE_OF_DEADLINE = 0.5


class WatchedMode:
    """Around a sync mode; `version` is the last one that the engine adopted."""

    def __init__(self, mode: SyncMode, waits: Waits, config: TrainConfig) -> None:
        self._mode = mode
        self._waits = waits
        self._config = config
        self.version: int | None = None

    def attach(self) -> Attached:
        loaded = Wanted(
            f"the engine at {self._config.engine_url} to be ready",
            fix="start it with `treadle engine`, or name another with --engine-url; its log says how far it is",
            of="engine",
            deadline_s=LONG_LOAD_S,
        )
        with self._waits.waiting(loaded):
            return self._mode.attach()

    def publish(self, policy: Publishable, version: int) -> Receipt:
        adoption = Wanted(
            f"the engine to adopt version {version}",
            fix="the engine's log says what it does; --publish-timeout-s ends this wait",
            of="engine",
            holding=f"step {version}",
            deadline_s=SHARE_OF_DEADLINE * self._config.publish_deadline_s,
        )
        with self._waits.waiting(adoption):
            receipt = self._mode.publish(policy, version)
        self.version = receipt.version
        return receipt
