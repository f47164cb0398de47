"""What every sink is, and what a resumed run needs to find its place at a tracking service again."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

Metric = float | int | str


class Tracker(Protocol):
    """What the training loop needs from a sink: one call per optimizer step, one dict under our names."""

    def log(self, step: int, metrics: Mapping[str, Metric]) -> None:
        """Record the metrics of one step: `log(3, {"reward": 0.25})`."""

    def truncate_after(self, step: int) -> None:
        """Forget every step later than `step`; a resumed run takes them again."""

    def close(self) -> None: ...


@dataclass(frozen=True)
class Table:
    """A few rows for people to read: `Table("train/rollouts", ("question", "reward"), [("1 + 1?", 0.5)])`."""

    name: str
    columns: tuple[str, ...]
    rows: Sequence[Sequence[str | float | bool | None]]


class TableTracker(Tracker, Protocol):
    """A sink that shows tables too."""

    def log_table(self, step: int, table: Table) -> None: ...


@dataclass(frozen=True)
class RunIdentity:
    """How a run is known at a service. It is kept in a file, so that a resumed run goes on where it was."""

    id: str
    folder: Path  # the service's own files go here
    project: str
    name: str
    group: str | None
    config: Mapping[str, Any]
    sent_until: int  # the last step that was sent before a restart; -1 for a new run


class ForwardOnly:
    """A run at a service that cannot take a step back: steps that it has already are not sent again."""

    _run: Any  # the service's own object, with `log(values, step=)`

    def __init__(self, identity: RunIdentity) -> None:
        self._sent_before = identity.sent_until
        self._newest = identity.sent_until

    def log(self, step: int, metrics: Mapping[str, Metric]) -> None:
        self._send(step, lambda: finite_numbers(metrics))

    def log_table(self, step: int, table: Table) -> None:
        self._send(step, lambda: {table.name: self._as_table(table)})

    def _as_table(self, table: Table) -> Any:
        """Convert to the service's own type of table."""
        raise NotImplementedError

    def _send(self, step: int, values: Callable[[], Mapping[str, Any]]) -> None:
        if step > self._sent_before and step >= self._newest:  # figures and tables of one step may come one by one
            self._run.log(dict(values()), step=step)
            self._newest = step

    def truncate_after(self, step: int) -> None:
        return  # see `_send`


def finite_numbers(metrics: Mapping[str, Metric]) -> dict[str, float]:
    """What can be drawn: no text, no NaN and no infinity."""
    numbers = {name: float(value) for name, value in metrics.items() if not isinstance(value, str)}
    return {name: value for name, value in numbers.items() if math.isfinite(value)}
