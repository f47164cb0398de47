"""Read the folder of a run: settings, metrics, evaluations, logs; and list the runs beside it.

metrics.jsonl is held as columns, and only lines that were added are read again.
"""

from __future__ import annotations

import json
import math
import os
import sys
import threading
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from treadle.config.env import labels_of_sources, parse_sources
from treadle.config.load import merge_derived
from treadle.track.files import HEALTH_FILE, TOKENS_FOLDER, HealthFile, TokenFiles
from treadle.track.plot import HeldOutPoint, pooled, pooled_mean

LARGEST = sys.float_info.max  # a damaged line may hold an integer that no float can
LARGEST_STEP = 2**62
CONFIG_FILE = "config.json"
SUMMARY_FILE = "summary.json"
MAX_TAIL_BYTES = 64 * 1024
MAX_RUNS = 200
_LINE = msgspec.json.Decoder(dict[str, Any])


@dataclass
class Columns:
    """Metrics by name, one row per step in ascending order; NaN where a step lacks a value."""

    steps: array[int] = field(default_factory=lambda: array("q"))
    by_name: dict[str, array[float]] = field(default_factory=dict)
    _last_names: tuple[str, ...] = ()
    _last_columns: list[array[float]] = field(default_factory=list)

    def add(self, line: dict[str, Any]) -> None:
        """A repeated step (the trainer was resumed) replaces the earlier one and all rows after it."""
        step = int(line.pop("step"))
        if self.steps and step <= self.steps[-1]:
            length = bisect_left(self.steps, step)
            del self.steps[length:]
            for column in self.by_name.values():
                del column[length:]
        self.steps.append(step)
        names = tuple(line)
        if names != self._last_names or len(names) != len(self.by_name):  # nearly all lines have the same names
            for name in names:
                if name not in self.by_name:
                    self.by_name[name] = array("d", [math.nan]) * (len(self.steps) - 1)
            self._last_names, self._last_columns = names, [self.by_name[name] for name in names]
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


class MetricsFile:
    """Reads metrics.jsonl incrementally. The file may not exist yet. Thread-safe.

    with file.columns() as columns:  # locked meanwhile
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
        """The current columns; cheap when nothing was added."""
        with self._lock:
            self._read()
            yield self._columns

    def read_on(self) -> None:
        """Read the added lines ahead of the first request."""
        with self._lock:
            self._read()

    def _read(self) -> None:
        try:
            file = self._path.open("rb")
        except (FileNotFoundError, NotADirectoryError):
            self._columns, self._inode, self._offset = Columns(), 0, 0
            return
        with file:
            state = os.fstat(file.fileno())
            # A resumed trainer replaces the file by a shorter one.
            if state.st_ino != self._inode or state.st_size < self._offset:
                self._columns, self._inode, self._offset = Columns(), state.st_ino, 0
            added = os.pread(file.fileno(), state.st_size - self._offset, self._offset)
        whole = added[: added.rfind(b"\n") + 1]  # the last line may be incomplete
        self._offset += len(whole)
        for line in whole.splitlines():
            try:
                values = _LINE.decode(line)
            except (msgspec.DecodeError, ValueError):  # truncated by a crash, or not UTF-8
                continue
            step = values.get("step")
            if isinstance(step, int) and 0 <= step <= LARGEST_STEP:
                self._columns.add(values)


class HeldOut(msgspec.Struct, frozen=True):
    """An evaluation: accuracy 0.73 at step 50, 95 % interval 0.67 to 0.78."""

    step: int
    accuracy: float
    low: float
    high: float
    mean_score: float | None = None  # of the answers that could be scored
    num_prompts: int = 1
    score_low: float | None = None  # of the mean score; None: it only says right or wrong
    score_high: float | None = None
    num_unscored: int = 0  # answers that are in none of the figures


Measured = tuple[HeldOut, dict[str, HeldOut]]  # an evaluation, and its parts by data source


class RunFolder:
    """`RunFolder(Path("runs/20260102-030405-arithmetic"))`; a missing folder counts as empty."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metrics = MetricsFile(path / "metrics.jsonl")
        self.tokens = TokenFiles(path / TOKENS_FOLDER)
        self._health = HealthFile(path / HEALTH_FILE)
        self._health_lock = threading.Lock()
        self._held_out: dict[Path, tuple[int, Measured | None]] = {}

    @property
    def name(self) -> str:
        return self.path.name

    def config(self) -> dict[str, Any]:
        """All settings of the run; empty without a config.json."""
        return merge_derived(read_object(self.path / CONFIG_FILE))

    @property
    def is_supervised(self) -> bool:
        """Whether `treadle sft` made it: it has no rollouts and no queue."""
        return bool(_rows_of(self.config()))

    @property
    def has_ended(self) -> bool:
        """Whether its launcher has written the summary; a resumed run has none until it ends again."""
        return (self.path / SUMMARY_FILE).is_file()

    def last_words(self) -> str:
        """The error that ended the run; "" if there was none or it is unknown."""
        return str(read_object(self.path / SUMMARY_FILE).get("last_words") or "")

    def held_out(self) -> list[HeldOut]:
        """The evaluations; several environments are pooled at the steps that all of them were evaluated at."""
        by_env = self._held_out_by_table()
        if not by_env:
            return [whole for whole, _ in self._held_out_in(self.path / "evals")]
        common = set.intersection(*({one.step for one in found} for found in by_env.values()))
        return [
            _pool([one for found in by_env.values() for one in found if one.step == step]) for step in sorted(common)
        ]

    def held_out_by_env(self) -> dict[str, list[HeldOut]]:
        """Evaluations by name of the environment, or by data source of the only one; empty if there is one of each."""
        by_env = self._held_out_by_table()
        if not by_env:
            by_env = {source: [] for source in sources_of(self.config())}
            for _, parts in self._held_out_in(self.path / "evals"):
                for source, part in parts.items():
                    by_env.setdefault(source, []).append(part)
        return by_env

    def _held_out_by_table(self) -> dict[str, list[HeldOut]]:
        tables = [table for table in self.config().get("envs") or [] if isinstance(table, dict)]
        measured = [table for table in tables if table.get("num_eval") and table.get("data_dir_to_save_evals")]
        return {
            str(table.get("wandb_name") or table.get("name")): [
                whole
                for whole, _ in self._held_out_in(self.path / "evals" / Path(str(table["data_dir_to_save_evals"])).name)
            ]
            for table in measured
        }

    def _held_out_in(self, folder: Path) -> list[Measured]:
        found = []
        for path in sorted(folder.glob("*.json")) if folder.is_dir() else ():
            try:
                written = path.stat().st_mtime_ns
            except OSError:  # deleted since it was listed
                continue
            known = self._held_out.get(path)
            if known is None or known[0] != written:
                known = self._held_out[path] = (written, _read_held_out(path))
            if known[1] is not None:
                found.append(known[1])
        return sorted(found, key=lambda one: one[0].step)

    def health(self, since_step: int) -> list[str]:
        """The trainer's health warnings after `since_step`; older ones that were not repeated no longer apply."""
        with self._health_lock:
            lines = self._health.read()
        return [str(line) for line in lines if line.step is None or line.step > since_step]

    def log_names(self) -> list[str]:
        folder = self.path / "logs"
        return sorted(path.stem for path in folder.glob("*.log")) if folder.is_dir() else []

    def log_tail(self, name: str, num_bytes: int = MAX_TAIL_BYTES) -> str | None:
        """The end of a process' log, starting at a whole line; None: no such log."""
        if name not in self.log_names():  # a requested name never becomes a path
            return None
        try:
            with (self.path / "logs" / f"{name}.log").open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                start = max(0, size - num_bytes)
                file.seek(start)
                text = file.read(num_bytes).decode("utf-8", errors="replace")
        except OSError:  # deleted since it was listed
            return None
        return text if start == 0 else text.partition("\n")[2]

    def log_written_at(self, name: str) -> float | None:
        try:
            return (self.path / "logs" / f"{name}.log").stat().st_mtime
        except OSError:
            return None


class Runs:
    """The run of this hub and the runs beside it, for comparison."""

    def __init__(self, own: RunFolder | None) -> None:
        self.own = own
        self._others: dict[str, RunFolder] = {}

    def names(self) -> list[str]:
        """Names of the other runs, newest first."""
        if self.own is None:
            return []
        try:
            beside = sorted(self.own.path.parent.iterdir(), reverse=True)
        except OSError:
            return []
        runs = (path.name for path in beside if path != self.own.path and (path / "metrics.jsonl").is_file())
        return [name for name, _ in zip(runs, range(MAX_RUNS), strict=False)]

    def get(self, name: str) -> RunFolder | None:
        """Look up a run by name; "" is the own one."""
        if self.own is None or name in ("", self.own.name):
            return self.own
        if name not in self._others:
            if name not in self.names():
                return None
            self._others[name] = RunFolder(self.own.path.parent / name)
        return self._others[name]


def env_tables(config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The settings of all environments."""
    tables = config.get("envs") or [config.get("env")]
    return [table for table in tables if isinstance(table, dict)]


def sources_of(config: Mapping[str, Any]) -> tuple[str, ...]:
    """The names of the data sources of the only environment, if there are several."""
    data = [table.get("data") for table in env_tables(config)]
    sources = parse_sources(data[0]) if len(data) == 1 and isinstance(data[0], str) else ()
    return labels_of_sources(sources) if len(sources) > 1 else ()


def task_of(config: Mapping[str, Any]) -> str:
    """`"gsm8k + arithmetic/addition"`, or "sft rows.jsonl"; "" if neither environment nor rows are named."""
    if rows := _rows_of(config):
        return f"sft {Path(rows).name}"
    names = ("/".join(str(table[key]) for key in ("name", "task") if table.get(key)) for table in env_tables(config))
    return " + ".join(filter(None, names))


def _rows_of(config: Mapping[str, Any]) -> str:
    """What a supervised run trained on; "" for any other run."""
    table = config.get("sft") or {}
    return str(table.get("data") or table.get("from_run") or "")


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; {} if the file is missing or damaged."""
    try:
        values = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}


def _pool(parts: list[HeldOut]) -> HeldOut:
    point = pooled([(one.num_prompts, HeldOutPoint(one.step, one.accuracy, one.low, one.high)) for one in parts])
    num_prompts = sum(one.num_prompts for one in parts)
    scores = [one.mean_score * one.num_prompts for one in parts if one.mean_score is not None]
    mean = sum(scores) / max(num_prompts, 1) if len(scores) == len(parts) else None
    bounded = [
        (one.num_prompts, (one.mean_score, one.score_low, one.score_high))
        for one in parts
        if one.mean_score is not None and one.score_low is not None and one.score_high is not None
    ]
    _, low, high = pooled_mean(bounded) if len(bounded) == len(parts) else (None, None, None)
    num_unscored = sum(one.num_unscored for one in parts)
    return HeldOut(point.step, point.accuracy, point.low, point.high, mean, num_prompts, low, high, num_unscored)


def _read_held_out(path: Path) -> Measured | None:
    values: Mapping[str, Any] = read_object(path)
    try:
        step, parts = int(values["step"]), values.get("by_source") or {}
        return _figures_of(values, step), {str(source): _figures_of(part, step) for source, part in parts.items()}
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError):
        return None


def _figures_of(values: Mapping[str, Any], step: int) -> HeldOut:
    accuracy = float(values["accuracy"])
    low, high = values.get("interval_95") or (accuracy, accuracy)
    mean = values.get("mean_score")
    score = None if mean is None else float(mean)
    bounds = values.get("mean_score_interval_95")
    score_low, score_high = (None, None) if bounds is None else (float(bounds[0]), float(bounds[1]))
    num_prompts, num_unscored = int(values.get("num_prompts") or 1), int(values.get("num_unscored") or 0)
    return HeldOut(step, accuracy, float(low), float(high), score, num_prompts, score_low, score_high, num_unscored)
