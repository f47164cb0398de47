"""What every sync mode takes and gives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class Publishable(Protocol):
    """What a sync mode needs of the trainer's policy."""

    def write_live_weights(self) -> None:
        """Put the last optimizer step into the live weights, and those where the engine reads."""


@dataclass(frozen=True)
class Receipt:
    """Proof of a publish: the version that the engine says it serves now, and what it cost."""

    version: int
    wait_s: float  # until the engine's running requests had finished
    write_s: float

    def metrics(self) -> dict[str, float]:
        return {"perf/weight_sync_pause_s": self.wait_s, "perf/weight_sync_transfer_s": self.write_s}
