"""Weights on their way to the engine: one folder a version, of which the two newest stay.

The engine may still read the one before the newest (a request in flight, a restart), never an older one.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from treadle.config import TrainConfig

KEPT = 2
PREFIXES = ("adapter_v", "weights_v")


class LiveFolder:
    """`root` is absolute: the engine may have another working folder."""

    def __init__(self, config: TrainConfig) -> None:
        self.root = (config.live_path or config.save_path / "live").resolve()
        self._written: list[Path] = []

    def prepare(self) -> Path:
        """Where to write the next one."""
        self.root.mkdir(parents=True, exist_ok=True)
        return self.root

    def arrived(self, folder: Path) -> int:
        """The engine has taken over `folder`: older ones go; the bytes it holds."""
        self._written = [*(f for f in self._written if f != folder), folder][-KEPT:]
        for other in self.root.iterdir():
            if other.name.startswith(PREFIXES) and other not in self._written:
                shutil.rmtree(other, ignore_errors=True)
        return sum(file.stat().st_size for file in folder.glob("*.safetensors"))

    def holds(self, folder: Path) -> bool:
        """Whether an engine that serves `folder` was restarted from here."""
        return folder.resolve().parent == self.root
