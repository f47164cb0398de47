"""Where the metrics of a run go. The JSONL file is always written; other sinks are added beside it."""

from __future__ import annotations

from treadle.track.files import JsonlTracker
from treadle.track.trackers import Metric, Tracker, build_tracker

__all__ = ["JsonlTracker", "Metric", "Tracker", "build_tracker"]
