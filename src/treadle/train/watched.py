"""The engine, as the trainer waits for it: under the watchdog's eyes."""

from __future__ import annotations

from collections.abc import Callable

from treadle.config import TrainConfig
from treadle.net.urls import shown_url
from treadle.sync.protocol import Attached, Publishable, Receipt, SyncMode
from treadle.watch.waits import Waits, Wanted
from treadle.watch.watchdog import About
from treadle.wire.hub import WorkReport

LONG_LOAD_S = 900.0
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
            f"the engine at {shown_url(self._config.engine_url)} to be ready",
            fix="start it with `treadle engine`, or name another with --engine-url; its log says how far it is",
            of="engine",
            deadline_s=LONG_LOAD_S,
        )
        with self._waits.waiting(loaded):
            return self._mode.attach()

    def settle(self) -> None:
        answer = Wanted(
            "the engine to say which weights it has",
            fix="the engine's log says what it does; --publish-timeout-s ends this wait",
            of="engine",
            deadline_s=SHARE_OF_DEADLINE * self._config.publish_deadline_s,
        )
        with self._waits.waiting(answer):
            self._mode.settle()

    def publish(self, policy: Publishable, version: int) -> Receipt:
        self.settle()
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


class Progress:
    """What the trainer reports while it computes: a step may take longer than anybody waits without a sign."""

    def __init__(self, mode: WatchedMode, check_stop: Callable[[], None]) -> None:
        self._mode = mode
        self._check_stop = check_stop
        self._num_micros = 0
        self._loading: WorkReport | None = None  # how far it has come, where that is known

    def loads(self, what: str, done: int, total: int) -> None:
        """Called before the first publish."""
        self._loading = WorkReport(what=what, done=done, total=total)

    def check(self) -> None:
        """Called before each micro."""
        self._num_micros += 1
        self._check_stop()

    def about(self) -> About:
        version = self._mode.version
        if version is None:
            return About(state="loading", work=self._loading)
        state = f"training step {version + 1}"
        return About(state=state, policy_version=version, counts={"micros": float(self._num_micros)})
