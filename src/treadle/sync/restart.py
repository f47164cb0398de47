"""none and lora_restart: save the model, or the adapter, and restart the engine from it.

The trainer does not wait for the engine to load: it goes on with the batches it can get, and the next publish, or the
last one itself, waits until the engine is there and proves what it serves.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

from treadle.config import TrainConfig
from treadle.log import get_logger
from treadle.sync.attaching import attach_adapters, attach_own_weights
from treadle.sync.engine_link import EngineLink
from treadle.sync.live_folder import LiveFolder
from treadle.sync.proof import Expected, Proof
from treadle.sync.receipt import NOT_VERIFIED, Attached, Publishable, Receipt, Verified
from treadle.wire.bridge import BridgeInfo, RestartEngine, Updated

log = get_logger("sync")


class RestartSync:
    """With all weights; lora_restart is the same with an adapter on top of the model that training began with."""

    publishes_adapters = False

    def __init__(self, config: TrainConfig) -> None:
        self._config = config
        self._engine = EngineLink.of_trainer(config)
        self._proof = Proof(
            config, self._engine, compares="adapter" if self.publishes_adapters else "weights", is_checked_later=True
        )
        self._live = LiveFolder(config)
        self._base = Path(config.model)
        self._served: int | None = None  # None: nothing was published yet
        self._pending: Future[tuple[int, Verified]] | None = None

    def attach(self) -> Attached:
        attach = attach_adapters if self.publishes_adapters else attach_own_weights
        attached = attach(self._config, self._engine)
        self._base = attached.folder
        return attached

    def settle(self) -> None:
        """A restart takes long: training goes on, and the next publish waits for it."""

    def publish(self, policy: Publishable, version: int) -> Receipt:
        started = time.monotonic()
        verified = self._settle()
        settled = time.monotonic()
        policy.write_live_weights()
        expected = self._proof.expect(policy, version)
        num_bytes = 0
        if self._serves_this_already(version):
            if self.publishes_adapters:
                expected = replace(expected, fingerprints=None)  # it has none yet, and ours changes nothing
            self._served, verified = version, self._proof.check(expected, version)
        else:
            folder = self._save(policy, version)
            num_bytes = self._live.arrived(folder)
            is_first = self._served is None
            self._begin(folder, expected)
            if is_first or version >= self._config.steps:  # rollouts begin, or the last evaluation
                verified = self._settle()
        return Receipt(
            version=version if self._served is None else self._served,
            wait_s=settled - started,
            write_s=time.monotonic() - settled,
            num_bytes=num_bytes,
            verified=verified,
        )

    def _serves_this_already(self, version: int) -> bool:
        """Before the first step the engine has what training begins with: a restart would change nothing."""
        if version != 0:
            return False
        info = self._engine.get("/bridge/info", BridgeInfo)
        return info.update_count == 0 and Path(info.model_name).resolve() == self._base.resolve()

    def _save(self, policy: Publishable, version: int) -> Path:
        if self.publishes_adapters:
            return policy.save_adapter(self._live.prepare(), f"adapter_v{version}")
        return policy.save_model(self._live.prepare(), f"weights_v{version}")

    def _begin(self, folder: Path, expected: Expected) -> None:
        """In a thread that does not keep the trainer from ending."""
        adapter = str(folder) if self.publishes_adapters else None
        model = str(self._base.resolve()) if self.publishes_adapters else str(folder)
        body = RestartEngine(model_path=model, adapter_path=adapter, policy_version=expected.version)
        self._pending = future = Future[tuple[int, Verified]]()

        def restart() -> None:
            try:
                updated = self._engine.post("/bridge/restart", body, Updated)
                served = updated.policy_version
                loaded = folder.name if self.publishes_adapters else None  # what the engine calls it
                future.set_result((served, self._proof.check(expected, served, adapter=loaded)))
                log.info("engine_restarted", policy_version=updated.policy_version, seconds=updated.seconds)
            except BaseException as error:  # it is raised where the publish is settled
                future.set_exception(error)

        threading.Thread(target=restart, name="engine-restart", daemon=True).start()

    def _settle(self) -> Verified:
        """Wait for a restart that is under way; what went wrong with it is raised here."""
        if self._pending is None:
            return NOT_VERIFIED
        self._served, verified = self._pending.result()  # the calls it waits for have deadlines
        self._pending = None
        return verified


class LoraRestartSync(RestartSync):
    publishes_adapters = True
