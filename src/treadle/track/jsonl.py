"""The metrics file: one JSON object per optimizer step, readable while the run goes on."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from treadle.errors import DiskFull


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
        kept = [line for line in self._path.read_bytes().splitlines() if _is_kept(line, step)]
        beside = self._path.with_suffix(".tmp")
        beside.write_bytes(b"".join(line + b"\n" for line in kept))
        os.replace(beside, self._path)
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
