"""Publish into the engine's memory: the mode shared_vllm, with one copy of the weights or with two.

One copy (SingleCopySync): the trainer's live weights are the engine's own memory.

    adopt  ──  the engine pauses at its gate (gate.py), between two tokens
    write  ──  the last optimizer step is written into the live weights
    resume ──  the engine continues under the new version, with empty caches

So no token is sampled from half-written weights. The weights do not change before the next publish, so they are
verified after the engine continues, and the result is checked before the next publish (verify.py).

Two copies (BroadcastSync, --use-shared-memory): the trainer sends its weights while the engine is paused.

    memory   copied into the file or the GPU memory that the engine serves from; on one machine
    nccl     broadcast in a process group of trainer and engine, between GPUs of one or two machines
    gloo     broadcast through main memory

An engine that is split over several workers (tensor parallel) takes broadcasts only: all its workers are in the group.

Each call has a deadline, so an engine that hangs ends in an error.
"""

from __future__ import annotations

import math
import os
import secrets
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

from msgspec import structs

from treadle.background import in_background
from treadle.config import TrainConfig
from treadle.config.sync import FIND_BRIDGE_FILE
from treadle.errors import ConfigError, SyncError
from treadle.loading import choose_device
from treadle.log import get_logger
from treadle.net.address import is_loopback
from treadle.sync.broadcaster import Receiver, WeightBroadcaster
from treadle.sync.gate import PublishGate
from treadle.sync.layout import Layout
from treadle.sync.protocol import (
    AttachedModel,
    EngineLink,
    Publishable,
    PublishResult,
    SyncMode,
    attach_own_weights,
    attach_remote,
    check_same_dtype,
    choose_folder,
)
from treadle.sync.shared_memory import find_bridge_file, gpu_uuid, read_bridge_file
from treadle.sync.variables import group_place
from treadle.sync.verify import PublishVerifier
from treadle.wire.bridge import (
    Adopt,
    BridgeInfo,
    BridgeState,
    Pause,
    Resume,
)

Transport = Literal["memory", "nccl", "gloo"]
Answer = TypeVar("Answer")
Outcome = TypeVar("Outcome")
log = get_logger("sync")


@dataclass(frozen=True)
class Adopted:
    """The engine's answer, and when the trainer started and finished writing."""

    state: BridgeState
    paused_at: float
    written_at: float


class SingleCopySync(SyncMode):
    """Write into the memory that the engine serves from."""

    has_one_copy = True

    def __init__(self, config: TrainConfig) -> None:
        self._config = config
        self._engine = EngineLink.of_trainer(config)
        self._verifier = PublishVerifier(config, self._engine)
        self._served: int | None = None  # the last known version of the engine
        self._gate: PublishGate | None = None  # None: not attached yet
        if config.vllm_restart_interval not in (None, 1):
            log.info("interval_without_effect", reason="in shared_vllm every step is published")

    def attach(self) -> AttachedModel:
        self._config.check_engine_workers(self._engine.wait_for("/bridge/info", BridgeInfo).num_workers)
        layout = self.fetch_layout()
        check_same_dtype(self._config, layout.dtype)
        folder = choose_folder(self._config, Path(layout.model))
        return AttachedModel(folder=folder, dtype=layout.dtype, layout=layout, has_one_copy=self.has_one_copy)

    def fetch_layout(self) -> Layout:
        """Where the engine's weights are; waits while the engine loads its model.

        A bridge file must agree with the engine. The file alone is not enough: only the engine knows which version is
        in memory, and whether it is half written.
        """
        layout = self._engine.wait_for("/bridge/state_dict_info", Layout)
        file = self._config.vllm_config_path
        if file == FIND_BRIDGE_FILE:
            file = find_bridge_file(os.environ, Path.cwd())
        if file is not None and read_bridge_file(file) != structs.replace(layout, policy_version=None, is_held=False):
            raise SyncError(
                f"{file} names other weights than the engine at {self._engine.url} serves",
                fix="give the file and the --engine-url (--vllm-port) of one engine, or leave --vllm-config-path out",
            )
        self._served = layout.policy_version
        self._gate = PublishGate(Path(layout.gate))
        return layout

    def settle(self) -> None:
        self._verifier.settle()

    def publish(self, policy: Publishable, version: int) -> PublishResult:
        self._verifier.settle()
        started = time.monotonic()
        adopted = self._write_weights(policy, version)
        self._served = adopted.state.policy_version
        verified = self._verifier.verify(policy, version, self._served)
        return PublishResult(
            version=version,
            wait_s=adopted.paused_at - started,
            write_s=adopted.written_at - adopted.paused_at,
            hold_s=adopted.state.held_s,
            num_bytes=self._num_bytes(policy),
            verified=verified,
        )

    def _write_weights(self, policy: Publishable, version: int) -> Adopted:
        gate = self._gate
        if gate is None:
            raise SyncError("nothing was attached to publish to", fix="attach first")
        publish_id = secrets.randbits(62) + 1  # never 0, the value of an unused cell
        timeout_s = self._config.publish_deadline_s
        order = Adopt(
            policy_version=version, number=publish_id, gate=gate.inode, after_version=self._served, timeout_s=timeout_s
        )
        with gate.publishing(publish_id):
            adopting = in_background("adopting", lambda: self._engine.post("/bridge/adopt", order, BridgeState))
            if not gate.wait_until_paused(publish_id, is_over=adopting.done):
                adopting.result()  # raises why the engine did not pause
                raise SyncError(
                    f"the engine at {self._engine.url} says that it adopted version {version} before it was written",
                    fix="use an engine of the same release",
                )
            paused_at = time.monotonic()
            policy.write_live_weights()
            written_at = time.monotonic()
            gate.mark_written(publish_id)
            return Adopted(adopting.result(), paused_at, written_at)

    def _num_bytes(self, policy: Publishable) -> int:
        return 0  # nothing is sent


_NO_GROUP = "MASTER_ADDR and MASTER_PORT have no effect: trainer and engine share the memory of the weights"


class BroadcastSync(SingleCopySync):
    """The trainer's weights are a separate copy, which is sent at each publish."""

    has_one_copy = False

    def __init__(self, config: TrainConfig) -> None:
        super().__init__(config)
        self._broadcaster: WeightBroadcaster | None = None  # None: through memory
        self._sent = 0

    def attach(self) -> AttachedModel:
        config, engine = self._config, self._engine
        info = engine.wait_for("/bridge/info", BridgeInfo)
        config.check_engine_workers(info.num_workers)
        is_here = is_loopback(engine.url)
        can_share = info.shared_weights and is_here and config.broadcast_by in ("auto", "memory")
        layout = self.fetch_layout() if can_share else None
        device = choose_device(config.device)
        transport = choose_transport(
            config.broadcast_by,
            engine.url,
            is_here=is_here,
            layout=layout,
            engine_device=info.device,
            own_device=device.type,
            own_gpu=gpu_uuid(device),
        )
        log.info("broadcast", by=transport, engine_device=info.device, own_device=str(device))
        place = group_place(config, os.environ)
        if transport == "memory":
            if place.port or place.host != config.broadcast_host:
                log.warning("variable_without_effect", note=_NO_GROUP)
            return super().attach()
        if place.note:
            log.warning("variable_without_effect", note=place.note)
        self._broadcaster = WeightBroadcaster(
            [Receiver(engine, info.num_workers)],
            transport,
            host=place.host,
            port=place.port,
            timeout_s=config.publish_deadline_s,
        )
        return attach_own_weights(config, engine) if is_here else attach_remote(config, info)

    def _write_weights(self, policy: Publishable, version: int) -> Adopted:
        if self._broadcaster is None:
            return super()._write_weights(policy, version)
        if not self._broadcaster.is_joined:
            self._broadcaster.join(policy)
        served = self._engine.get("/bridge/info", BridgeInfo).update_count
        if self._served not in (None, served):
            raise SyncError(
                f"the engine at {self._engine.url} serves version {served}, where {self._served} was published last: "
                "it was restarted, or another trainer publishes to it",
                fix="end the other trainer, restart the engine, then treadle run --resume",
            )
        self._engine.post("/bridge/pause", Pause(mode="keep"), BridgeState)
        paused_at = time.monotonic()
        policy.write_live_weights()
        self._sent = self._broadcaster.send(policy)
        written_at = time.monotonic()
        state = self._engine.post("/bridge/resume", Resume(policy_version=version), BridgeState)
        return Adopted(state, paused_at, written_at)

    def _num_bytes(self, policy: Publishable) -> int:
        return self._sent or sum(math.prod(shape) for _, shape in policy.served_shapes()) * policy.dtype.itemsize


def choose_transport(
    requested: Literal["auto", "memory", "nccl", "gloo"],
    url: str,
    *,
    is_here: bool,
    layout: Layout | None,
    engine_device: str,
    own_device: str,
    own_gpu: str | None,
) -> Transport:
    """`is_here`: the engine is on this machine. `layout`: of its shared weights, if it shares them. Pure.

    >>> far = {"is_here": False, "layout": None, "own_gpu": "GPU-1"}
    >>> choose_transport("auto", "http://far:9001", engine_device="cuda", own_device="cuda", **far)
    'nccl'
    >>> choose_transport("auto", "http://far:9001", engine_device="cpu", own_device="cuda", **far)
    'gloo'
    """
    are_gpus = engine_device.startswith("cuda") and own_device == "cuda"
    if requested == "nccl" and not are_gpus:
        raise ConfigError(
            f"NCCL is between GPUs: the engine at {url} is on {engine_device}, the trainer on {own_device}",
            fix="set --broadcast-by gloo, or leave it out",
        )
    if requested == "memory" and not is_here:
        raise ConfigError(
            f"the engine at {url} is on another machine, and memory is shared on one",
            fix="set --broadcast-by gloo or nccl, or leave it out",
        )
    if requested != "auto":
        return requested
    if is_here and layout is not None and all(storage.device_uuid == own_gpu for storage in layout.storages):
        return "memory"
    return "nccl" if are_gpus else "gloo"
