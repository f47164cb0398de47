"""No engine: for training from recorded batches, and for tests of the loop."""

from __future__ import annotations

import time
from pathlib import Path

from treadle.config import TrainConfig
from treadle.errors import ModelError
from treadle.sync.receipt import Attached, Publishable, Receipt


class OfflineSync:
    """No engine to feed: the trainer's own live weights are all there is."""

    def __init__(self, config: TrainConfig) -> None:
        self._config = config

    def attach(self) -> Attached:
        folder = Path(self._config.model)
        if not folder.is_dir():
            raise ModelError(f"there is no model folder '{folder}'", fix="without an engine, --model takes a folder")
        return Attached(folder=folder, dtype=self._config.dtype)

    def settle(self) -> None:
        """There is nothing to know."""

    def publish(self, policy: Publishable, version: int) -> Receipt:
        started = time.monotonic()
        policy.write_live_weights()
        return Receipt(version=version, wait_s=0.0, write_s=time.monotonic() - started)
