"""TensorBoard, through the tensorboard package's own writer: neither torch nor TensorFlow is needed."""

from __future__ import annotations

import html
import time
from collections.abc import Mapping
from pathlib import Path

from treadle.errors import MissingExtra
from treadle.track.sink import Metric, Table, finite_numbers


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

    def log_table(self, step: int, table: Table) -> None:
        """As text, which its page "Text" shows as a table."""
        from tensorboard.plugins.text import summary_v2

        summary = summary_v2.text_pb(table.name, as_markdown(table))
        self._writer.add_event(self._events.Event(wall_time=time.time(), step=step, summary=summary))
        self._writer.flush()

    def truncate_after(self, step: int) -> None:
        """Tell every reader that what earlier files hold from `step` + 1 on did not happen."""
        restart = self._events.SessionLog(status=self._events.SessionLog.START)
        self._writer.add_event(self._events.Event(wall_time=time.time(), step=step + 1, session_log=restart))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def as_markdown(table: Table) -> str:
    r"""What a model wrote is shown as it is: no cell ends early, and no markup in it is obeyed.

    >>> print(as_markdown(Table("t", ("question", "reward"), [("a|b\n<c>", 0.25)])))
    | question | reward |
    |---|---|
    | a&#124;b ↵ &lt;c&gt; | 0.25 |
    """
    head = ["| " + " | ".join(table.columns) + " |", "|" + "---|" * len(table.columns)]
    return "\n".join([*head, *("| " + " | ".join(map(_cell, row)) + " |" for row in table.rows)])


def _cell(value: str | float | bool | None) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        return f"{value:g}" if isinstance(value, float) else str(value)
    return html.escape(value, quote=False).replace("|", "&#124;").replace("\n", " ↵ ")
