"""reload: all weights go to disk, and the running engine takes them from there."""

from __future__ import annotations

import time
from pathlib import Path

from treadle.config import TrainConfig
from treadle.sync.attaching import attach_own_weights
from treadle.sync.engine_link import EngineLink
from treadle.sync.live_folder import LiveFolder
from treadle.sync.proof import Proof
from treadle.sync.receipt import Attached, Publishable, Receipt
from treadle.wire.bridge import ReloadWeights, Updated


class ReloadSync:
    def __init__(self, config: TrainConfig) -> None:
        self._config = config
        self._engine = EngineLink.of_trainer(config)
        self._proof = Proof(config, self._engine)
        self._live = LiveFolder(config)

    def attach(self) -> Attached:
        return attach_own_weights(self._config, self._engine)

    def settle(self) -> None:
        self._proof.settle()

    def publish(self, policy: Publishable, version: int) -> Receipt:
        self._proof.settle()
        started = time.monotonic()
        policy.write_live_weights()
        folder = self._save(policy, self._live.prepare(), f"weights_v{version}")
        body = ReloadWeights(path=str(folder), policy_version=version)
        updated = self._engine.post("/reload_weights", body, Updated)
        written = time.monotonic()
        verified = self._proof.verify(policy, version, updated.policy_version)
        return Receipt(
            version=version,
            wait_s=0.0,
            write_s=written - started,
            hold_s=updated.held_s,
            num_bytes=self._live.arrived(folder),
            verified=verified,
        )

    def _save(self, policy: Publishable, root: Path, name: str) -> Path:
        return policy.save_model(root, name)
