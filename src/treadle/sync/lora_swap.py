"""lora_only: adapters, loaded while the engine serves.

Every publish is a new adapter under a name that is never used again: an engine caches by name, and what runs goes on
under the adapter it began with. The two newest stay loaded. With --single-copy the trainer reads the engine's own base
model instead of loading it a second time.
"""

from __future__ import annotations

import secrets
import time
from dataclasses import replace

import msgspec

from treadle.config import TrainConfig
from treadle.sync.attaching import attach_adapters
from treadle.sync.engine_link import EngineLink
from treadle.sync.layout import Layout
from treadle.sync.live_folder import KEPT, LiveFolder
from treadle.sync.proof import Proof
from treadle.sync.receipt import Attached, Publishable, Receipt
from treadle.wire.bridge import LoadAdapter, LoadedAdapter, UnloadAdapter


class _Loaded(msgspec.Struct):
    name: str
    policy_version: int | None  # None: loaded by hand, which is none of our business


class _Status(msgspec.Struct):
    """Of GET /lora/status, what is looked at."""

    adapters: list[_Loaded]


class LoraSwapSync:
    def __init__(self, config: TrainConfig) -> None:
        self._config = config
        self._engine = EngineLink.of_trainer(config)
        self._proof = Proof(config, self._engine, compares="adapter")
        self._live = LiveFolder(config)
        self._kept: list[str] = []  # adapters that stay loaded
        self._life = secrets.token_hex(3)  # a run that goes on after a crash must not use a name again

    def attach(self) -> Attached:
        attached = attach_adapters(self._config, self._engine)
        if not self._config.single_copy:
            return attached
        layout = self._engine.wait_for("/bridge/state_dict_info", Layout)  # of the base: adapters are not part of it
        return replace(attached, layout=layout, has_one_copy=True)

    def settle(self) -> None:
        self._proof.settle()

    def publish(self, policy: Publishable, version: int) -> Receipt:
        self._proof.settle()
        started = time.monotonic()
        policy.write_live_weights()
        folder = policy.save_adapter(self._live.prepare(), f"adapter_v{version}")
        body = LoadAdapter(
            adapter_path=str(folder), adapter_name=f"adapter_v{version}-{self._life}", policy_version=version
        )
        loaded = self._engine.post("/lora/load", body, LoadedAdapter)
        sent = time.monotonic()
        verified = self._proof.verify(policy, version, loaded.policy_version, loaded.adapter_name)
        num_bytes = self._live.arrived(folder)
        self._kept = [*self._kept, loaded.adapter_name][-KEPT:]
        self._unload_older()
        return Receipt(
            version=version,
            wait_s=0.0,
            write_s=sent - started,
            num_bytes=num_bytes,
            verified=verified,
        )

    def _unload_older(self) -> None:
        """Those of the policy that are two publishes old, or of an earlier life of this run."""
        for adapter in self._engine.get("/lora/status", _Status).adapters:
            if adapter.policy_version is not None and adapter.name not in self._kept:
                self._engine.post("/lora/unload", UnloadAdapter(adapter_name=adapter.name), dict)
