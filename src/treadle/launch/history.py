"""What a run has written so far: its steps (metrics.jsonl) and its evaluations (evals/*.json)."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from treadle.config.schema import RunConfig
from treadle.track.jsonl import read_steps
from treadle.track.plot import HeldOutPoint

Step = dict[str, Any]
# Where the time of a step goes, and the metric that says so.
SECONDS_PER_STEP = {
    "generation": "rollout/generation_s",
    "training": "perf/train_s",
    "waiting": "perf/wait_s",
}


@dataclass(frozen=True)
class Evaluation:
    """Held-out prompts, answered at one policy version."""

    step: int
    accuracy: float
    low: float
    high: float
    num_right: int
    num_prompts: int
    samples: tuple[dict[str, Any], ...] = ()

    @property
    def point(self) -> HeldOutPoint:
        return HeldOutPoint(self.step, self.accuracy, self.low, self.high)


@dataclass(frozen=True)
class History:
    """Both, in the order of their steps."""

    steps: tuple[Step, ...] = ()
    evaluations: tuple[Evaluation, ...] = ()

    @property
    def last_step(self) -> int:
        return int(self.steps[-1]["step"]) if self.steps else 0

    def values(self, key: str) -> list[float]:
        """The known values of one metric: `values("rollout/accuracy")` -> [0.02, 0.05]."""
        return [float(step[key]) for step in self.steps if isinstance(step.get(key), (int, float))]

    def last(self, key: str) -> float | None:
        value = self.steps[-1].get(key) if self.steps else None
        return float(value) if isinstance(value, (int, float)) else None

    def mean(self, key: str) -> float | None:
        values = self.values(key)
        return sum(values) / len(values) if values else None

    @property
    def before(self) -> Evaluation | None:
        """The evaluation of the untrained model."""
        first = self.evaluations[0] if self.evaluations else None
        return first if first is not None and first.step == 0 else None

    @property
    def after(self) -> Evaluation | None:
        """The evaluation after the last step; None while it has not been made."""
        last = self.evaluations[-1] if self.evaluations else None
        return last if last is not None and last.step > 0 and last.step >= self.last_step else None


@dataclass
class HistoryReader:
    """Reads again only what has changed, because a view asks several times a second."""

    metrics_file: Path
    evals_folder: Path
    _seen: tuple[object, ...] = ()
    _history: History = field(default_factory=History)

    def read(self) -> History:
        eval_files = sorted(self.evals_folder.glob("*.json")) if self.evals_folder.is_dir() else []
        seen = tuple(_fingerprint(path) for path in [self.metrics_file, *eval_files])
        if seen != self._seen:
            evaluations = [found for path in eval_files if (found := read_evaluation(path)) is not None]
            steps = {int(step["step"]): step for step in read_steps(self.metrics_file)}  # a repeated step counts once
            self._history = History(
                tuple(steps[number] for number in sorted(steps)),
                tuple(sorted(evaluations, key=lambda evaluation: evaluation.step)),
            )
            self._seen = seen
        return self._history


def reader_of(config: RunConfig, run_folder: Path) -> HistoryReader:
    return HistoryReader(
        config.train.metrics_file or run_folder / "metrics.jsonl",
        config.env.data_dir_to_save_evals or run_folder / "evals",
    )


def read_evaluation(path: Path) -> Evaluation | None:
    """None for a file that is not (yet) a whole evaluation."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        low, high = values.get("interval_95") or (values["accuracy"], values["accuracy"])
        return Evaluation(
            step=int(values["step"]),
            accuracy=float(values["accuracy"]),
            low=float(low),
            high=float(high),
            num_right=int(values.get("num_right", 0)),
            num_prompts=int(values.get("num_prompts", 0)),
            samples=tuple(values.get("samples") or ()),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _fingerprint(path: Path) -> tuple[str, int, int]:
    try:
        state = path.stat()
    except FileNotFoundError:
        return str(path), 0, 0
    return str(path), state.st_size, state.st_mtime_ns
