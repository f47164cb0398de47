"""TensorBoard, through the tensorboard package's own writer: neither torch nor TensorFlow is needed."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from treadle.errors import MissingExtra
from treadle.track.sink import Metric, finite_numbers


class TensorboardTracker:
    """Event files in `folder`; look at them with `tensorboard --logdir FOLDER`."""

    def __init__(self, folder: Path) -> None:
        try:
            from tensorboard.compat.proto import event_pb2, summary_pb2
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ImportError:
            raise MissingExtra("--track tensorboard needs tensorboard", fix="pip install 'treadle[trackers]'") from None
        self._events, self._summaries = event_pb2, summary_pb2
        self._writer = EventFileWriter(str(folder))

    def log(self, step: int, metrics: Mapping[str, Metric]) -> None:
        value = self._summaries.Summary.Value
        values = [value(tag=name, simple_value=number) for name, number in finite_numbers(metrics).items()]
        summary = self._summaries.Summary(value=values)
        self._writer.add_event(self._events.Event(wall_time=time.time(), step=step, summary=summary))
        self._writer.flush()

    def truncate_after(self, step: int) -> None:
        """Tell every reader that what earlier files hold from `step` + 1 on did not happen."""
        restart = self._events.SessionLog(status=self._events.SessionLog.START)
        self._writer.add_event(self._events.Event(wall_time=time.time(), step=step + 1, session_log=restart))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
