"""Choose the sync mode by name; the modes that publish weights or adapters through files. shared_vllm.py has the other.

reload                  write all weights; the running engine loads them
delta                   like reload, with only the elements that changed since the engine's version
lora_only               write an adapter; the engine loads it while it serves
none, lora_restart      write the model or the adapter, and restart the engine from it
offline                 no engine

Several engines (reload, lora_only): fleet.py. Neither the training loop nor the policy knows which mode is used.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from treadle.background import in_background
from treadle.config import TrainConfig
from treadle.errors import ModelError
from treadle.log import get_logger
from treadle.sync.delta import COMPARED, DELTA_FROM, WeightUpdate, as_tensors, find_changes, set_weight, smaller_form
from treadle.sync.fingerprint import whole_fingerprint
from treadle.sync.fleet_transports import choose_fleet_sync
from treadle.sync.layout import Layout
from treadle.sync.model_folders import LiveFolder
from treadle.sync.protocol import (
    NOT_VERIFIED,
    AttachedModel,
    EngineLink,
    Publishable,
    PublishResult,
    SyncMode,
    Verified,
    attach_adapters,
    attach_own_weights,
)
from treadle.sync.shared_vllm import BroadcastSync, SingleCopySync
from treadle.sync.verify import Compared, ExpectedState, PublishVerifier
from treadle.sync.version_files import AdapterFiles, WeightFiles
from treadle.wire.bridge import BridgeInfo, RestartEngine, Updated

log = get_logger("sync")


class _FileSync(SyncMode):
    """What the modes share that publish through files; `compares`, `is_checked_later`: see PublishVerifier."""

    compares: Compared = "weights"
    is_checked_later = False

    def __init__(self, config: TrainConfig) -> None:
        self._config = config
        self._engine = EngineLink.of_trainer(config)
        self._verifier = PublishVerifier(
            config, self._engine, compares=self.compares, is_checked_later=self.is_checked_later
        )
        self._live = LiveFolder(config)

    def attach(self) -> AttachedModel:
        attach = attach_adapters if self.compares == "adapter" else attach_own_weights
        return attach(self._config, self._engine)

    def settle(self) -> None:
        self._verifier.settle()


class ReloadSync(_FileSync):
    def __init__(self, config: TrainConfig) -> None:
        super().__init__(config)
        self._files = WeightFiles()

    def publish(self, policy: Publishable, version: int) -> PublishResult:
        self._verifier.settle()
        started = time.monotonic()
        policy.write_live_weights()
        folder = self._save(policy, self._live.prepare(), version)
        handed = self._files.hand_over(self._engine, folder, version)
        written = time.monotonic()
        verified = self._verifier.verify(policy, version, handed.version)
        return PublishResult(
            version=version,
            wait_s=0.0,
            write_s=written - started,
            hold_s=handed.held_s,
            num_bytes=handed.num_bytes(self._live.keep_newest(folder)),
            verified=verified,
        )

    def _save(self, policy: Publishable, root: Path, version: int) -> Path:
        return self._files.save(policy, root, version)


class KnownWeights:
    """The weights that the engine has: a copy in host memory of 16-bit weights, fingerprints of others.

    A step with a small learning rate changes a small part of nearly every 16-bit weight, so changed elements are sent
    (delta.py). Of a 32-bit weight nearly every element changes: it is sent whole if its fingerprint changed.
    """

    def __init__(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self._copies: dict[str, Tensor] = {}
        self._fingerprints: dict[str, str] = {}
        for name, weight in weights:
            if weight.dtype in COMPARED:
                self._copies[name] = torch.empty(weight.shape, dtype=weight.dtype).copy_(weight)
            else:
                self._fingerprints[name] = whole_fingerprint(weight)

    def advance(self, weights: Iterable[tuple[str, Tensor]]) -> dict[str, WeightUpdate]:
        """Return the updates that give the engine `weights`, each in its smaller form, and remember them."""
        updates: dict[str, WeightUpdate] = {}
        for name, weight in weights:
            if name in self._copies:
                changes = find_changes(weight, self._copies[name])
                if len(changes.indices):
                    updates[name] = smaller_form(weight, changes)
                    set_weight(self._copies[name], changes)
            elif (now := whole_fingerprint(weight)) != self._fingerprints[name]:
                updates[name] = weight
                self._fingerprints[name] = now
        return updates


class DeltaSync(ReloadSync):
    def __init__(self, config: TrainConfig) -> None:
        super().__init__(config)
        self._known: KnownWeights | None = None  # None: everything is sent
        self._known_version = 0

    def publish(self, policy: Publishable, version: int) -> PublishResult:
        try:
            if self._engine.get("/bridge/info", BridgeInfo).update_count != self._known_version:
                self._known = None  # the engine was restarted
            receipt = super().publish(policy, version)
        except BaseException:
            self._known = None  # the engine may have either version, or a mixture
            raise
        self._known_version = version
        return receipt

    def _save(self, policy: Publishable, root: Path, version: int) -> Path:
        if self._known is None:
            self._known = KnownWeights(policy.served_weights())
            return super()._save(policy, root, version)
        tensors = as_tensors(self._known.advance(policy.served_weights()))
        return policy.save_weights(root, f"weights_v{version}", tensors, {DELTA_FROM: str(self._known_version)})


class LoraSwapSync(_FileSync):
    """Every publish is a new adapter. With --single-copy the trainer reads the engine's base model instead of loading
    it."""

    compares = "adapter"

    def __init__(self, config: TrainConfig) -> None:
        super().__init__(config)
        self._files = AdapterFiles()

    def attach(self) -> AttachedModel:
        attached = super().attach()
        if not self._config.single_copy:
            return attached
        self._config.check_engine_workers(self._engine.get("/bridge/info", BridgeInfo).num_workers)
        layout = self._engine.wait_for("/bridge/state_dict_info", Layout)  # of the base model, without adapters
        return replace(attached, layout=layout, has_one_copy=True)

    def publish(self, policy: Publishable, version: int) -> PublishResult:
        self._verifier.settle()
        started = time.monotonic()
        policy.write_live_weights()
        folder = self._files.save(policy, self._live.prepare(), version)
        handed = self._files.hand_over(self._engine, folder, version)
        sent = time.monotonic()
        verified = self._verifier.verify(policy, version, handed.version, handed.adapter)
        num_bytes = handed.num_bytes(self._live.keep_newest(folder))
        self._files.clean_up(self._engine, handed)
        return PublishResult(
            version=version,
            wait_s=0.0,
            write_s=sent - started,
            num_bytes=num_bytes,
            verified=verified,
        )


class RestartSync(_FileSync):
    """Publish all weights by a restart; LoraRestartSync publishes an adapter on top of the starting model.

    Training continues while the engine loads. The next publish waits for the restart and its verification; the first
    and the last publish wait themselves.
    """

    is_checked_later = True

    def __init__(self, config: TrainConfig) -> None:
        super().__init__(config)
        self._base = Path(config.model)
        self._served: int | None = None  # None: nothing published yet
        self._pending: Future[tuple[int, Verified]] | None = None

    def attach(self) -> AttachedModel:
        attached = super().attach()
        self._base = attached.folder
        return attached

    def settle(self) -> None:
        """A restart takes long: the next publish waits for it, not the training."""

    def publish(self, policy: Publishable, version: int) -> PublishResult:
        started = time.monotonic()
        verified = self._settle()
        settled = time.monotonic()
        policy.write_live_weights()
        expected = self._verifier.expect(policy, version)
        num_bytes = 0
        if self._serves_this_already(version):
            if self.compares == "adapter":
                expected = replace(expected, fingerprints=None)  # it has no adapter yet, and the trainer's is zero
            self._served, verified = version, self._verifier.check(expected, version)
        else:
            folder = self._save(policy, version)
            num_bytes = self._live.keep_newest(folder)
            is_first = self._served is None
            self._begin(folder, expected)
            if is_first or version >= self._config.steps:  # needed by the first rollouts and the last evaluation
                verified = self._settle()
        return PublishResult(
            version=version if self._served is None else self._served,
            wait_s=settled - started,
            write_s=time.monotonic() - settled,
            num_bytes=num_bytes,
            verified=verified,
        )

    def _serves_this_already(self, version: int) -> bool:
        """Before the first step the engine has the starting model: a restart would change nothing."""
        if version != 0:
            return False
        info = self._engine.get("/bridge/info", BridgeInfo)
        return info.update_count == 0 and Path(info.model_name).resolve() == self._base.resolve()

    def _save(self, policy: Publishable, version: int) -> Path:
        if self.compares == "adapter":
            return policy.save_adapter(self._live.prepare(), f"adapter_v{version}")
        return policy.save_model(self._live.prepare(), f"weights_v{version}")

    def _begin(self, folder: Path, expected: ExpectedState) -> None:
        """Restart the engine in a daemon thread."""
        adapter = str(folder) if self.compares == "adapter" else None
        model = str(self._base.resolve()) if self.compares == "adapter" else str(folder)
        body = RestartEngine(model_path=model, adapter_path=adapter, policy_version=expected.version)

        def restart() -> tuple[int, Verified]:
            updated = self._engine.post("/bridge/restart", body, Updated)
            served = updated.policy_version
            loaded = folder.name if self.compares == "adapter" else None  # the adapter's name in the engine
            verified = self._verifier.check(expected, served, adapter=loaded)
            log.info("engine_restarted", policy_version=served, seconds=updated.seconds)
            return served, verified

        self._pending = in_background("engine-restart", restart)  # its error is raised by the next publish

    def _settle(self) -> Verified:
        """Wait for a pending restart, and raise its error."""
        if self._pending is None:
            return NOT_VERIFIED
        self._served, verified = self._pending.result()  # the calls it waits for have deadlines
        self._pending = None
        return verified


class LoraRestartSync(RestartSync):
    compares = "adapter"


class OfflineSync(SyncMode):
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

    def publish(self, policy: Publishable, version: int) -> PublishResult:
        started = time.monotonic()
        policy.write_live_weights()
        return PublishResult(version=version, wait_s=0.0, write_s=time.monotonic() - started)


class PublishEveryNth(SyncMode):
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

    def welcome(self) -> Callable[[Publishable], None] | None:
        return self._mode.welcome()

    def publish(self, policy: Publishable, version: int) -> PublishResult:
        if self._served is None or version % self._interval == 0 or version >= self._last:
            receipt = self._mode.publish(policy, version)
            self._served = receipt.version
            return receipt
        self._mode.settle()  # before a step that was sampled under this version is counted and saved
        started = time.monotonic()
        policy.write_live_weights()
        return PublishResult(version=self._served, wait_s=0.0, write_s=time.monotonic() - started)


SYNC_MODES: dict[str, Callable[[TrainConfig], SyncMode]] = {
    "shared_vllm": lambda config: BroadcastSync(config) if config.use_shared_memory else SingleCopySync(config),
    "lora_only": LoraSwapSync,
    "lora_restart": LoraRestartSync,
    "none": RestartSync,
    "reload": ReloadSync,
    "delta": DeltaSync,
    "offline": OfflineSync,
}


def choose_sync(config: TrainConfig) -> SyncMode:
    mode = choose_fleet_sync(config) if config.has_fleet else SYNC_MODES[config.weight_bridge_mode](config)
    if config.publish_interval == 1:
        return mode
    return PublishEveryNth(mode, interval=config.publish_interval, last=config.steps)
