"""metrics.jsonl as columns, read once and then only what was added."""

from __future__ import annotations

import math
import os
import sys
import threading
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from treadle.track.names import with_todays_names

LARGEST = sys.float_info.max  # a damaged line may hold an integer that no float can
LARGEST_STEP = 2**62
_LINE = msgspec.json.Decoder(dict[str, Any])


@dataclass
class Columns:
    """One row a step, in their order; NaN where a step lacks a figure."""

    steps: array[int] = field(default_factory=lambda: array("q"))
    by_name: dict[str, array[float]] = field(default_factory=dict)
    _last_names: tuple[str, ...] = ()
    _last_columns: list[array[float]] = field(default_factory=list)

    def add(self, line: dict[str, Any]) -> None:
        """A step that comes again, because the trainer was resumed, replaces the earlier one and what followed."""
        step = int(line.pop("step"))
        if self.steps and step <= self.steps[-1]:
            self._cut(bisect_left(self.steps, step))
        self.steps.append(step)
        names = tuple(line)
        if names != self._last_names or len(names) != len(self.by_name):  # nearly all lines have the names of the last
            self._last_names, self._last_columns = names, [self._column(name) for name in names]
        for column, value in zip(self._last_columns, line.values(), strict=True):
            is_number = isinstance(value, float | int) and not isinstance(value, bool) and abs(value) <= LARGEST
            column.append(value if is_number else math.nan)
        if len(names) != len(self.by_name):
            for column in self.by_name.values():
                if len(column) < len(self.steps):
                    column.append(math.nan)

    def known(self, name: str, last: int, until_step: int | None = None) -> list[float]:
        """The values of the last `last` steps (up to `until_step`) that have this metric."""
        end = len(self.steps) if until_step is None else bisect_right(self.steps, until_step)
        column = self.by_name.get(name, array("d"))[max(0, end - last) : end]
        return [value for value in column if not math.isnan(value)]

    def _column(self, name: str) -> array[float]:
        """Under today's name; filled up to the step before this one."""
        (todays_name,) = with_todays_names({name: None})
        column = self.by_name.get(todays_name)
        if column is None:
            column = self.by_name[todays_name] = array("d", [math.nan]) * (len(self.steps) - 1)
        return column

    def _cut(self, length: int) -> None:
        del self.steps[length:]
        for column in self.by_name.values():
            del column[length:]


class MetricsFile:
    """Give it a path that may not be there yet. May be shared by threads.

    with file.columns() as columns:  # nobody adds to them meanwhile
        last_step = columns.steps[-1]
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._columns = Columns()
        self._inode = 0
        self._offset = 0

    @contextmanager
    def columns(self) -> Iterator[Columns]:
        """As of now; cheap when nothing was added."""
        with self._lock:
            self._read()
            yield self._columns

    def read_on(self) -> None:
        """Read what was added, before somebody waits for it."""
        with self._lock:
            self._read()

    def _read(self) -> None:
        try:
            with self._path.open("rb") as file:
                self._read_on(file.fileno())
        except (FileNotFoundError, NotADirectoryError):
            self._begin_anew(0)

    def _begin_anew(self, inode: int) -> None:
        self._columns, self._inode, self._offset = Columns(), inode, 0

    def _read_on(self, descriptor: int) -> None:
        state = os.fstat(descriptor)
        if state.st_ino != self._inode or state.st_size < self._offset:  # a resumed trainer puts a shorter one there
            self._begin_anew(state.st_ino)
        added = os.pread(descriptor, state.st_size - self._offset, self._offset)
        whole = added[: added.rfind(b"\n") + 1]  # the last line may still be under way
        self._offset += len(whole)
        for line in whole.splitlines():
            try:
                values = _LINE.decode(line)
            except (msgspec.DecodeError, ValueError):  # a crash cut it short, or it is not UTF-8
                continue
            step = values.get("step")
            if isinstance(step, int) and 0 <= step <= LARGEST_STEP:
                self._columns.add(values)
