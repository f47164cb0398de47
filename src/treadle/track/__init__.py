"""Where the metrics of a run go. The JSONL file is always written; other sinks are added beside it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from treadle.track.jsonl import JsonlTracker

Metric = float | int | str


class Tracker(Protocol):
    """What the training loop needs from a sink: one call per optimizer step, one namespaced dict."""

    def log(self, step: int, metrics: Mapping[str, Metric]) -> None:
        """Record the metrics of one step: `log(3, {"reward/mean": 0.25})`."""

    def truncate_after(self, step: int) -> None:
        """Forget every step later than `step`; a resumed run takes them again."""

    def close(self) -> None: ...


__all__ = ["JsonlTracker", "Metric", "Tracker"]
