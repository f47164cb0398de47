"""Give an engine a version that was saved as files: all weights, or an adapter. For one engine (modes.py) and several
(fleet.py)."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from treadle.sync.model_folders import NUM_KEPT
from treadle.sync.protocol import EngineLink, Publishable, unload_other_adapters
from treadle.sync.verify import Compared
from treadle.wire.bridge import LoadAdapter, LoadedAdapter, ReloadWeights, Updated


@dataclass(frozen=True)
class HandedOver:
    version: int  # that the engine says it serves
    adapter: str | None = None
    held_s: float = 0.0


class VersionFiles(Protocol):
    """Save a version once, and hand it to any engine, as often as needed."""

    compares: Compared

    def save(self, policy: Publishable, root: Path, version: int) -> Path: ...

    def hand_over(self, engine: EngineLink, folder: Path, version: int) -> HandedOver: ...

    def clean_up(self, engine: EngineLink, handed: HandedOver) -> None:
        """Free what older versions take in the engine; called when the version is proved."""


class WeightFiles:
    compares: Compared = "weights"

    def save(self, policy: Publishable, root: Path, version: int) -> Path:
        return policy.save_model(root, f"weights_v{version}")

    def hand_over(self, engine: EngineLink, folder: Path, version: int) -> HandedOver:
        updated = engine.post("/reload_weights", ReloadWeights(path=str(folder), policy_version=version), Updated)
        return HandedOver(updated.policy_version, held_s=updated.held_s)

    def clean_up(self, engine: EngineLink, handed: HandedOver) -> None:
        """The new weights have replaced the old ones."""


class AdapterFiles:
    """Every version is a new adapter under a new name: engines cache by name, and running requests keep their adapter.
    The newest two stay loaded."""

    compares: Compared = "adapter"

    def __init__(self) -> None:
        self._suffix = secrets.token_hex(3)  # a resumed run must not reuse an adapter's name
        self._kept: list[str] = []  # names of the newest versions

    def save(self, policy: Publishable, root: Path, version: int) -> Path:
        self._kept = [*self._kept, self._name(version)][-NUM_KEPT:]
        return policy.save_adapter(root, f"adapter_v{version}")

    def hand_over(self, engine: EngineLink, folder: Path, version: int) -> HandedOver:
        body = LoadAdapter(adapter_path=str(folder), adapter_name=self._name(version), policy_version=version)
        loaded = engine.post("/lora/load", body, LoadedAdapter)
        return HandedOver(loaded.policy_version, adapter=loaded.adapter_name)

    def clean_up(self, engine: EngineLink, handed: HandedOver) -> None:
        unload_other_adapters(engine, [*self._kept, *([handed.adapter] if handed.adapter else [])])

    def _name(self, version: int) -> str:
        return f"adapter_v{version}-{self._suffix}"
