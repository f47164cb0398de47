"""shared_vllm with --use-shared-memory, two copies: the trainer has its own, and hands over what it published.

    memory   into the file, or the GPU's memory, that the engine serves from; on one machine
    nccl     broadcast in a process group of trainer and engine, between GPUs of one or of two machines
    gloo     the same through main memory

While the engine is held. Each call has a deadline, so an engine that hangs ends in an error.
"""

from __future__ import annotations

import time
from typing import Literal

from treadle.config import TrainConfig
from treadle.errors import ConfigError, SyncError
from treadle.log import get_logger
from treadle.sync.attaching import attach_from_afar, attach_own_weights
from treadle.sync.cuda_ipc import card_of
from treadle.sync.device import choose_device
from treadle.sync.group_link import GroupLink
from treadle.sync.layout import Layout
from treadle.sync.receipt import Attached, Publishable
from treadle.sync.single_copy import Adopted, SingleCopySync
from treadle.wire.bridge import BridgeInfo, BridgeState, Pause, Resume

Way = Literal["memory", "nccl", "gloo"]
log = get_logger("sync")


class BroadcastSync(SingleCopySync):
    """The same calls as with one copy; only the trainer's weights are elsewhere between two publishes."""

    has_one_copy = False

    def __init__(self, config: TrainConfig) -> None:
        super().__init__(config)
        self._link: GroupLink | None = None  # None: through memory
        self._sent = 0

    def attach(self) -> Attached:
        config, engine = self._config, self._engine
        info = engine.wait_for("/bridge/info", BridgeInfo)
        can_share = info.shared_weights and engine.is_on_this_machine and config.broadcast_by in ("auto", "memory")
        layout = self.fetch_layout() if can_share else None
        device = choose_device(config.device)
        way = choose_way(
            config.broadcast_by,
            engine.url,
            is_here=engine.is_on_this_machine,
            layout=layout,
            engine_device=info.device,
            own_device=device.type,
            own_card=card_of(device),
        )
        log.info("broadcast", by=way, engine_device=info.device, own_device=str(device))
        if way == "memory":
            return super().attach()
        self._link = GroupLink(engine, way, host=config.broadcast_host, timeout_s=config.publish_deadline_s)
        return attach_own_weights(config, engine) if engine.is_on_this_machine else attach_from_afar(config, info)

    def _let_adopt(self, policy: Publishable, version: int) -> Adopted:
        if self._link is None:
            return super()._let_adopt(policy, version)
        if not self._link.is_joined:
            self._link.join(policy)
        self._refuse_other_version(self._engine.get("/bridge/info", BridgeInfo).update_count)
        self._engine.post("/bridge/pause", Pause(mode="keep"), BridgeState)
        still_at = time.monotonic()
        policy.write_live_weights()
        self._sent = self._link.send(policy)
        written_at = time.monotonic()
        state = self._engine.post("/bridge/resume", Resume(policy_version=version), BridgeState)
        return Adopted(state, still_at, written_at)

    def _refuse_other_version(self, served: int) -> None:
        if self._served in (None, served):
            return
        raise SyncError(
            f"the engine at {self._engine.url} serves version {served}, where {self._served} was published last: it "
            "was restarted, or another trainer publishes to it",
            fix="end the other trainer, restart the engine, then treadle run --resume",
        )

    def _num_bytes(self, policy: Publishable) -> int:
        return self._sent or sum(weight.nbytes for _, weight in policy.served_weights())


def choose_way(
    wished: Literal["auto", "memory", "nccl", "gloo"],
    url: str,
    *,
    is_here: bool,
    layout: Layout | None,
    engine_device: str,
    own_device: str,
    own_card: str | None,
) -> Way:
    """`is_here`: the engine is on this machine. `layout`: where it offers its weights, if it does. Pure.

    >>> far = {"is_here": False, "layout": None, "own_card": "GPU-1"}
    >>> choose_way("auto", "http://far:9001", engine_device="cuda", own_device="cuda", **far)
    'nccl'
    >>> choose_way("auto", "http://far:9001", engine_device="cpu", own_device="cuda", **far)
    'gloo'
    """
    are_gpus = engine_device.startswith("cuda") and own_device == "cuda"
    if wished == "nccl" and not are_gpus:
        raise ConfigError(
            f"NCCL is between GPUs: the engine at {url} is on {engine_device}, the trainer on {own_device}",
            fix="set --broadcast-by gloo, or leave it out",
        )
    if wished == "memory" and not is_here:
        raise ConfigError(
            f"the engine at {url} is on another machine, and memory is shared on one",
            fix="set --broadcast-by gloo or nccl, or leave it out",
        )
    if wished != "auto":
        return wished
    if is_here and layout is not None and all(storage.device_uuid == own_card for storage in layout.storages):
        return "memory"
    return "nccl" if are_gpus else "gloo"
