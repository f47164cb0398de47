"""What a run's folder holds, read for the page: its settings, figures, evaluations, logs; and the runs beside it."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from treadle.config.load import merge_derived
from treadle.dash.metrics_file import MetricsFile
from treadle.track.health_log import HealthLog
from treadle.track.plot import HeldOutPoint, pooled
from treadle.track.token_files import FOLDER as TOKENS
from treadle.track.token_files import TokenFiles

CONFIG_FILE = "config.json"
SUMMARY_FILE = "summary.json"
MAX_TAIL_BYTES = 64 * 1024
MAX_RUNS = 200


class HeldOut(msgspec.Struct, frozen=True):
    """An evaluation: accuracy 0.73 at step 50, 95 % interval 0.67 to 0.78."""

    step: int
    accuracy: float
    low: float
    high: float
    mean_score: float | None = None  # of the answers that could be scored
    num_prompts: int = 1


class RunFolder:
    """`RunFolder(Path("runs/20260102-030405-arithmetic"))`; a folder that is not there holds nothing."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metrics = MetricsFile(path / "metrics.jsonl")
        self.tokens = TokenFiles(path / TOKENS)
        self._health = HealthLog(path / "logs" / "trainer.log")
        self._health_lock = threading.Lock()
        self._held_out: dict[Path, tuple[int, HeldOut | None]] = {}

    @property
    def name(self) -> str:
        return self.path.name

    def config(self) -> dict[str, Any]:
        """Every setting of the run; empty when none are written."""
        return merge_derived(_read_object(self.path / CONFIG_FILE))

    def last_words(self) -> str:
        """The error that ended the run; "" where none did, or it was never written."""
        return str(_read_object(self.path / SUMMARY_FILE).get("last_words") or "")

    def held_out(self) -> list[HeldOut]:
        """The evaluations; of several environments, over all prompts, at the steps that all were evaluated at."""
        by_env = self.held_out_by_env()
        if not by_env:
            return self._held_out_in(self.path / "evals")
        common = set.intersection(*({one.step for one in found} for found in by_env.values()))
        return [
            _pool([one for found in by_env.values() for one in found if one.step == step]) for step in sorted(common)
        ]

    def held_out_by_env(self) -> dict[str, list[HeldOut]]:
        """By the names of several environments; empty where there is one."""
        tables = [table for table in self.config().get("envs") or [] if isinstance(table, dict)]
        measured = [table for table in tables if table.get("num_eval") and table.get("data_dir_to_save_evals")]
        return {
            str(table.get("wandb_name") or table.get("name")): self._held_out_in(
                self.path / "evals" / Path(str(table["data_dir_to_save_evals"])).name
            )
            for table in measured
        }

    def _held_out_in(self, folder: Path) -> list[HeldOut]:
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
        return sorted(found, key=lambda one: one.step)

    def health(self, since_step: int) -> list[str]:
        """The trainer's health warnings after that step; one that it has not repeated no longer applies."""
        with self._health_lock:
            lines = self._health.read()
        return [str(line) for line in lines if line.step is None or line.step > since_step]

    def log_names(self) -> list[str]:
        folder = self.path / "logs"
        return sorted(path.stem for path in folder.glob("*.log")) if folder.is_dir() else []

    def log_tail(self, name: str, num_bytes: int = MAX_TAIL_BYTES) -> str | None:
        """The end of a process' log, from a whole line on; None: it has no log."""
        if name not in self.log_names():  # a name from outside never becomes a path
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
    """The run of this hub and those that lie beside it, which it can be compared with."""

    def __init__(self, own: RunFolder | None) -> None:
        self.own = own
        self._others: dict[str, RunFolder] = {}

    def names(self) -> list[str]:
        """The others, the newest first."""
        if self.own is None:
            return []
        try:
            beside = sorted(self.own.path.parent.iterdir(), reverse=True)
        except OSError:
            return []
        runs = (path.name for path in beside if path != self.own.path and (path / "metrics.jsonl").is_file())
        return [name for name, _ in zip(runs, range(MAX_RUNS), strict=False)]

    def get(self, name: str) -> RunFolder | None:
        """By its name, own or other; "" is the own one."""
        if self.own is None or name in ("", self.own.name):
            return self.own
        if name not in self._others:
            if name not in self.names():
                return None
            self._others[name] = RunFolder(self.own.path.parent / name)
        return self._others[name]


def env_tables(config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The settings of the environments, of which there may be several."""
    tables = config.get("envs") or [config.get("env")]
    return [table for table in tables if isinstance(table, dict)]


def task_of(config: Mapping[str, Any]) -> str:
    """`"gsm8k + arithmetic/addition"`; "" where no environment is named."""
    names = ("/".join(str(table[key]) for key in ("name", "task") if table.get(key)) for table in env_tables(config))
    return " + ".join(filter(None, names))


def _read_object(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}


def _pool(parts: list[HeldOut]) -> HeldOut:
    point = pooled([(one.num_prompts, HeldOutPoint(one.step, one.accuracy, one.low, one.high)) for one in parts])
    num_prompts = sum(one.num_prompts for one in parts)
    scores = [one.mean_score * one.num_prompts for one in parts if one.mean_score is not None]
    mean = sum(scores) / num_prompts if len(scores) == len(parts) else None
    return HeldOut(point.step, point.accuracy, point.low, point.high, mean, num_prompts)


def _read_held_out(path: Path) -> HeldOut | None:
    values: Mapping[str, Any] = _read_object(path)
    try:
        accuracy = float(values["accuracy"])
        low, high = values.get("interval_95") or (accuracy, accuracy)
        mean = values.get("mean_score")
        score = None if mean is None else float(mean)
        num_prompts = int(values.get("num_prompts") or 1)
        return HeldOut(int(values["step"]), accuracy, float(low), float(high), score, num_prompts)
    except (KeyError, TypeError, ValueError, OverflowError):
        return None
