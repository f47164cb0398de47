"""Write and read the trainer's JSON lines: the metrics of each step, and health events.

metrics.jsonl    one object per optimizer step
health.jsonl     beside it, an event when a metric leaves its healthy range and when it is back:
                 {"step": 12, "message": "mean_ratio 1.31 (healthy 0.8 to 1.2): ..."}

Both can be read while the run goes on.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from treadle.config.advice import as_flags_of
from treadle.errors import DiskFull

HEALTH_FILE = "health.jsonl"


class JsonlTracker:
    """Append one line per step: `log(3, {"reward": 0.25, "policy_loss": float("nan")})` appends
    {"step": 3, "reward": 0.25, "policy_loss": null}."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        _end_last_line(path)
        self._file = path.open("a", encoding="utf-8")

    def log(self, step: int, metrics: Mapping[str, float | int | str]) -> None:
        line = {"step": step, **{key: _jsonable(value) for key, value in metrics.items()}}
        with self._naming_a_full_disk():
            self._file.write(json.dumps(line, allow_nan=False) + "\n")
            self._file.flush()  # a reader sees the step at once; durability is the checkpoint's business

    def truncate_after(self, step: int) -> None:
        """Drop the lines of later steps, and lines that a crash cut short; the file changes in one move."""
        self._file.close()
        _truncate_after(self._path, step)
        self._file = self._path.open("a", encoding="utf-8")

    def close(self) -> None:
        with self._naming_a_full_disk():
            self._file.close()

    @contextlib.contextmanager
    def _naming_a_full_disk(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise DiskFull(
                f"the disk is full while writing {self._path}",
                fix="free some space and continue with treadle run --resume",
            ) from None


def read_steps(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a metrics file, in order; a missing file is an empty one."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return []
    steps = (_parsed(line) for line in content.splitlines())
    return [step for step in steps if step is not None]


@dataclass(frozen=True)
class HealthEvent:
    """What the trainer found at a step: `HealthEvent(12, "mean_ratio 1.31 (healthy 0.8 to 1.2): ...")`."""

    step: int
    message: str

    def __str__(self) -> str:
        return f"step {self.step}: {self.message}"


@dataclass
class HealthFile:
    """The health events of a run. `read` continues where it stopped: a view asks several times a second."""

    path: Path
    _offset: int = 0
    _events: list[HealthEvent] = field(default_factory=list)

    def write(self, step: int, message: str) -> None:
        """Append an event. A disk that refuses it is no error here: the metrics file reports that."""
        with contextlib.suppress(OSError):
            _end_last_line(self.path)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"step": step, "message": message}) + "\n")

    def truncate_after(self, step: int) -> None:
        """Drop the events of later steps, which a resumed trainer takes again."""
        if self.path.exists():
            _truncate_after(self.path, step)

    def read(self) -> tuple[HealthEvent, ...]:
        """All events, each once: a resumed trainer repeats steps. Messages name the flags of `treadle run`."""
        try:
            with self.path.open("rb") as file:
                if os.fstat(file.fileno()).st_size < self._offset:  # truncated by a resumed trainer
                    self._offset, self._events = 0, []
                file.seek(self._offset)
                new = file.read()
        except OSError:
            return tuple(self._events)
        whole = new[: new.rfind(b"\n") + 1]  # the last line may be incomplete
        self._offset += len(whole)
        for line in whole.splitlines():
            values = _parsed(line)
            if values is not None and isinstance(values.get("message"), str):
                event = HealthEvent(values["step"], as_flags_of("run", values["message"], "train"))
                self._events += [event] if event not in self._events else []
        return tuple(self._events)


def _truncate_after(path: Path, step: int) -> None:
    """Keep the whole lines up to `step`. Readers see the old file or the new one."""
    kept = [line for line in path.read_bytes().splitlines() if _is_kept(line, step)]
    beside = path.with_suffix(".tmp")
    beside.write_bytes(b"".join(line + b"\n" for line in kept))
    os.replace(beside, path)


def _is_kept(line: bytes, last_step: int) -> bool:
    values = _parsed(line)
    return values is not None and int(values["step"]) <= last_step


def _parsed(line: bytes) -> dict[str, Any] | None:
    """A line's values; None for one that is not whole (a crash, a damaged disk, or a write that is still under way)."""
    try:
        values = json.loads(line)
    except ValueError:  # no JSON, or not UTF-8
        return None
    return values if isinstance(values, dict) and isinstance(values.get("step"), int) else None


def _jsonable(value: float | int | str) -> float | int | str | None:
    if isinstance(value, (str, int)):
        return value
    number = float(value)  # numpy's and torch's scalars too
    return number if math.isfinite(number) else None


def _end_last_line(path: Path) -> None:
    """A line that a crash cut short must not swallow the first line that we append."""
    try:
        with path.open("rb+") as file:
            if file.seek(0, os.SEEK_END) == 0:
                return
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")
    except FileNotFoundError:
        return
