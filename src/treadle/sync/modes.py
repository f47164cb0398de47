"""The sync modes by name. One is chosen once; neither the loop nor the policy knows which."""

from __future__ import annotations

from collections.abc import Callable

from treadle.config import TrainConfig
from treadle.sync.broadcast import BroadcastSync
from treadle.sync.delta import DeltaSync
from treadle.sync.every_nth import EveryNth
from treadle.sync.lora_swap import LoraSwapSync
from treadle.sync.offline import OfflineSync
from treadle.sync.receipt import SyncMode
from treadle.sync.reload import ReloadSync
from treadle.sync.restart import LoraRestartSync, RestartSync
from treadle.sync.single_copy import SingleCopySync


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
