"""delta: as reload, with only the weights that changed since the engine's version.

A weight is sent whole when any of it changed; engines take whole ones. So it pays where most weights stay: adapters
merged into some layers, or --train-layer-indices. Trained in full, nearly every weight changes a little at every step.
"""

from __future__ import annotations

from pathlib import Path

from treadle.config import TrainConfig
from treadle.sync.fingerprint import whole_fingerprint
from treadle.sync.receipt import Publishable, Receipt
from treadle.sync.reload import ReloadSync
from treadle.wire.bridge import BridgeInfo


class DeltaSync(ReloadSync):
    """What the engine has is known by fingerprints of whole weights: no further copy of them is kept."""

    def __init__(self, config: TrainConfig) -> None:
        super().__init__(config)
        self._saved: dict[str, str] = {}  # of the weights that were last saved
        self._arrived: dict[str, str] | None = None  # of those that the engine is proved to have
        self._arrived_version: int | None = None

    def publish(self, policy: Publishable, version: int) -> Receipt:
        if self._engine.get("/bridge/info", BridgeInfo).update_count != self._arrived_version:
            self._arrived = None  # the first publish, or it was restarted: it gets everything
        receipt = super().publish(policy, version)
        self._arrived, self._arrived_version = self._saved, version
        return receipt

    def _save(self, policy: Publishable, root: Path, name: str) -> Path:
        self._saved = {weight: whole_fingerprint(value) for weight, value in policy.served_weights()}
        if self._arrived is None:
            return policy.save_model(root, name)
        changed = {weight for weight, value in self._saved.items() if self._arrived[weight] != value}
        return policy.save_weights(root, name, changed or set(list(self._saved)[:1]))  # an engine takes at least one
