"""Choose the sync mode by name. Neither the training loop nor the policy knows which one is used."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from treadle.config import TrainConfig
from treadle.errors import ModelError
from treadle.sync.file_modes import DeltaSync, LoraRestartSync, LoraSwapSync, ReloadSync, RestartSync
from treadle.sync.protocol import AttachedModel, Publishable, Receipt, SyncMode
from treadle.sync.shared_vllm import BroadcastSync, SingleCopySync


class OfflineSync:
    """No engine: for training from recorded batches, and for tests of the loop."""

    def __init__(self, config: TrainConfig) -> None:
        self._config = config

    def attach(self) -> AttachedModel:
        folder = Path(self._config.model)
        if not folder.is_dir():
            raise ModelError(f"there is no model folder '{folder}'", fix="without an engine, --model takes a folder")
        return AttachedModel(folder=folder, dtype=self._config.dtype)

    def settle(self) -> None:
        """Nothing is pending."""

    def publish(self, policy: Publishable, version: int) -> Receipt:
        started = time.monotonic()
        policy.write_live_weights()
        return Receipt(version=version, wait_s=0.0, write_s=time.monotonic() - started)


class EveryNth:
    """Publish only versions that are multiples of `interval`, the first one, and `last`. In between the engine serves
    the last published version."""

    def __init__(self, mode: SyncMode, *, interval: int, last: int) -> None:
        self._mode = mode
        self._interval = interval
        self._last = last
        self._served: int | None = None  # None: nothing published yet

    def attach(self) -> AttachedModel:
        return self._mode.attach()

    def settle(self) -> None:
        self._mode.settle()

    def publish(self, policy: Publishable, version: int) -> Receipt:
        if self._served is None or version % self._interval == 0 or version >= self._last:
            receipt = self._mode.publish(policy, version)
            self._served = receipt.version
            return receipt
        self._mode.settle()  # before a step that was sampled under this version is counted and saved
        started = time.monotonic()
        policy.write_live_weights()
        return Receipt(version=self._served, wait_s=0.0, write_s=time.monotonic() - started)


def _shared(config: TrainConfig) -> SyncMode:
    return BroadcastSync(config) if config.use_shared_memory else SingleCopySync(config)


SYNC_MODES: dict[str, Callable[[TrainConfig], SyncMode]] = {
    "shared_vllm": _shared,
    "lora_only": LoraSwapSync,
    "lora_restart": LoraRestartSync,
    "none": RestartSync,
    "reload": ReloadSync,
    "delta": DeltaSync,
    "offline": OfflineSync,
}


def choose_sync(config: TrainConfig) -> SyncMode:
    mode = SYNC_MODES[config.weight_bridge_mode](config)
    if config.publish_interval == 1:
        return mode
    return EveryNth(mode, interval=config.publish_interval, last=config.steps)
