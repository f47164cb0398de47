"""delta: as reload, with only what changed since the engine's version.

Of 16-bit weights the trainer keeps what the engine has, in host memory, and sends the elements whose bits changed
(changes.py): after a step with a small learning rate that is a small part of nearly every weight. Of 32-bit weights
nearly every element changes: there a fingerprint says whether a weight did, it is sent whole, and no copy is kept.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from treadle.config import TrainConfig
from treadle.sync.changes import DELTA_FROM, Sent, as_tensors, find_changes, set_weight, smaller_form
from treadle.sync.fingerprint import whole_fingerprint
from treadle.sync.receipt import Publishable, Receipt
from treadle.sync.reload import ReloadSync
from treadle.wire.bridge import BridgeInfo

COMPARED = (torch.bfloat16, torch.float16)


class Known:
    """What the engine has: 16-bit weights themselves, fingerprints of others."""

    def __init__(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self._copies: dict[str, Tensor] = {}
        self._fingerprints: dict[str, str] = {}
        for name, weight in weights:
            if weight.dtype in COMPARED:
                self._copies[name] = torch.empty(weight.shape, dtype=weight.dtype).copy_(weight)
            else:
                self._fingerprints[name] = whole_fingerprint(weight)

    def advance(self, weights: Iterable[tuple[str, Tensor]]) -> dict[str, Sent]:
        """The engine is to have these: what must be sent for it, each weight in its smaller form."""
        sent: dict[str, Sent] = {}
        for name, weight in weights:
            if name in self._copies:
                changes = find_changes(weight, self._copies[name])
                if len(changes.indices):
                    sent[name] = smaller_form(weight, changes)
                    set_weight(self._copies[name], changes)
            elif (now := whole_fingerprint(weight)) != self._fingerprints[name]:
                sent[name] = weight
                self._fingerprints[name] = now
        return sent


class DeltaSync(ReloadSync):
    def __init__(self, config: TrainConfig) -> None:
        super().__init__(config)
        self._known: Known | None = None  # None: the engine gets everything
        self._known_version = 0

    def publish(self, policy: Publishable, version: int) -> Receipt:
        try:
            if self._engine.get("/bridge/info", BridgeInfo).update_count != self._known_version:
                self._known = None  # it was restarted
            receipt = super().publish(policy, version)
        except BaseException:
            self._known = None  # the engine may have either version, or some of both
            raise
        self._known_version = version
        return receipt

    def _save(self, policy: Publishable, root: Path, name: str) -> Path:
        if self._known is None:
            self._known = Known(policy.served_weights())
            return policy.save_model(root, name)
        sent = as_tensors(self._known.advance(policy.served_weights()))
        return policy.save_weights(root, name, sent, {DELTA_FROM: str(self._known_version)})
