"""Read what a run has written: its steps (metrics.jsonl), evaluations (evals/*.json) and health warnings (log).

With several environments each has a folder of evaluations (evals/gsm8k/*.json). `History.by_env` holds them separately,
`History.evaluations` pools them at the steps that all were evaluated at. With several data sources, `by_env` holds the
parts of each evaluation by source.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any, TypeGuard

from treadle.config.env import folder_of, labels_of
from treadle.config.schema import RunConfig
from treadle.dash.run_folder import CONFIG_FILE, HeldOut
from treadle.errors import ConfigError
from treadle.track.files import HEALTH_FILE, HealthEvent, HealthFile, read_steps
from treadle.track.plot import HeldOutPoint, pooled, pooled_mean

Step = dict[str, Any]
# Parts of the time of a step, and the metrics that add up to each.
SECONDS_PER_STEP = {
    "training": ("perf/fwd_bwd_s", "perf/optimizer_s"),
    "waiting": ("perf/rollout_wait_s",),
}
GENERATION_S = "rollout/generation_s"  # of a group, in parallel to the steps: it may take longer than one

# In a step whose groups all scored the same, no token is trained.
TOKENS_PER_SECOND = {
    "generated": "perf/generated_tok_s_wall_clock",
    "trained": "perf/trained_tok_s_wall_clock",
}

LARGEST_NUMBER = 1e300  # sums of larger ones are infinite


@dataclass(frozen=True)
class Evaluation:
    """Held-out prompts, answered at one policy version."""

    step: int
    accuracy: float
    low: float
    high: float
    num_right: int
    num_prompts: int  # with an answer that could be scored
    samples: tuple[dict[str, Any], ...] = ()
    ended: float | None = None  # share of the answers that ended before the length limit; None: unknown
    max_tokens: int | None = None  # an answer that reaches this many tokens is cut off
    policy_version: int | None = None  # that answered, as reported by the engine
    mean_score: float | None = None  # of the answers that could be scored; None: unknown
    score_low: float | None = None  # its 95 % interval; None: a score only says right or wrong, or it is unknown
    score_high: float | None = None
    num_unscored: int = 0  # answers that are in none of the figures, because scoring failed
    env: str = ""  # name of the environment, if there are several; of a part, of the data source
    by_source: Mapping[str, Evaluation] = field(default_factory=dict)  # its parts, of several data sources

    @property
    def point(self) -> HeldOutPoint:
        return HeldOutPoint(self.step, self.accuracy, self.low, self.high)


@dataclass(frozen=True)
class History:
    """Steps, evaluations and health warnings, in the order of steps."""

    steps: tuple[Step, ...] = ()
    evaluations: tuple[Evaluation, ...] = ()
    health: tuple[HealthEvent, ...] = ()
    # By environment, or by data source of the only one; empty: there is one of each.
    by_env: Mapping[str, tuple[Evaluation, ...]] = field(default_factory=dict)

    @property
    def measured(self) -> tuple[Evaluation, ...]:
        """All evaluations, and their parts by data source; of several environments each one instead of the pool."""
        whole = [one for one in self.evaluations if one.by_source or not self.by_env]
        return (*whole, *chain.from_iterable(self.by_env.values()))

    def of_env(self, label: str) -> History:
        """The same steps with the evaluations of one of several environments."""
        return History(self.steps, self.by_env.get(label, ()), self.health)

    @property
    def last_step(self) -> int:
        return int(self.steps[-1]["step"]) if self.steps else 0

    def values(self, *keys: str) -> list[float]:
        """The known values of one metric, or of the sum of several: `values("rollout/accuracy")` -> [0.02, 0.05]."""
        return [value for step in self.steps if (value := _sum(step, keys)) is not None]

    def last(self, *keys: str) -> float | None:
        return _sum(self.steps[-1], keys) if self.steps else None

    def mean(self, *keys: str) -> float | None:
        values = self.values(*keys)
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
    """Reads only what has changed, because a view calls it several times a second."""

    metrics_file: Path
    evals_folder: Path
    health_file: HealthFile | None = None
    folders_by_env: Mapping[str, Path] = field(default_factory=dict)  # of several environments
    _seen: tuple[object, ...] = ()
    _history: History = field(default_factory=History)

    def read(self) -> History:
        folders = self.folders_by_env or {"": self.evals_folder}
        files = {env: sorted(folder.glob("*.json")) if folder.is_dir() else [] for env, folder in folders.items()}
        log_file = [] if self.health_file is None else [self.health_file.path]
        watched = [self.metrics_file, *log_file, *chain.from_iterable(files.values())]
        seen = tuple(_fingerprint(path) for path in watched)
        if seen != self._seen:
            by_env: dict[str, tuple[Evaluation, ...]] = {}
            for env, paths in files.items():
                found = [replace(one, env=env) for path in paths if (one := read_evaluation(path)) is not None]
                by_env[env] = tuple(sorted(found, key=lambda evaluation: evaluation.step))
            steps = {int(step["step"]): step for step in read_steps(self.metrics_file)}  # a repeated step counts once
            self._history = History(
                tuple(steps[number] for number in sorted(steps)),
                pool(by_env) if self.folders_by_env else by_env[""],
                () if self.health_file is None else self.health_file.read(),
                by_env if self.folders_by_env else parts_by_source(by_env[""]),
            )
            self._seen = seen
        return self._history


def pool(by_env: Mapping[str, Sequence[Evaluation]]) -> tuple[Evaluation, ...]:
    """One evaluation for each step at which all environments have one; each prompt counts once."""
    of_env = [{evaluation.step: evaluation for evaluation in found} for found in by_env.values()]
    common = set.intersection(*(set(found) for found in of_env)) if of_env else set()
    return tuple(_pool([found[step] for found in of_env]) for step in sorted(common))


def parts_by_source(evaluations: Sequence[Evaluation]) -> dict[str, tuple[Evaluation, ...]]:
    """The evaluations of each data source, at the steps at which it was asked."""
    sources = dict.fromkeys(chain.from_iterable(one.by_source for one in evaluations))
    return {
        source: tuple(one.by_source[source] for one in evaluations if source in one.by_source) for source in sources
    }


def _pool(parts: Sequence[Evaluation]) -> Evaluation:
    point = pooled([(part.num_prompts, part.point) for part in parts])
    scores = [
        (part.num_prompts, (part.mean_score, part.score_low, part.score_high))
        for part in parts
        if part.mean_score is not None and part.score_low is not None and part.score_high is not None
    ]
    _, score_low, score_high = pooled_mean(scores) if len(scores) == len(parts) else (None, None, None)

    def mean(values: Sequence[float | None]) -> float | None:
        known = [(part.num_prompts, value) for part, value in zip(parts, values, strict=True) if value is not None]
        total = sum(num for num, _ in known)
        return sum(num * value for num, value in known) / total if total and len(known) == len(parts) else None

    return Evaluation(
        step=point.step,
        accuracy=point.accuracy,
        low=point.low,
        high=point.high,
        num_right=sum(part.num_right for part in parts),
        num_prompts=sum(part.num_prompts for part in parts),
        samples=tuple(chain.from_iterable(part.samples for part in parts)),
        ended=mean([part.ended for part in parts]),
        policy_version=min((v for part in parts if (v := part.policy_version) is not None), default=None),
        mean_score=mean([part.mean_score for part in parts]),
        score_low=score_low,
        score_high=score_high,
        num_unscored=sum(part.num_unscored for part in parts),
    )


def check_is_run(folder: Path) -> None:
    if not (folder / CONFIG_FILE).is_file():
        raise ConfigError(
            f"{folder} is not the folder of a run: it holds no {CONFIG_FILE}",
            fix="name the folder that `treadle run` printed when it began",
        )


def reader_of(config: RunConfig, run_folder: Path) -> HistoryReader:
    """A reader of the files in the run's folder, which may have moved; else of the paths in the settings."""
    metrics, evals = run_folder / "metrics.jsonl", run_folder / "evals"
    if not metrics.exists():
        metrics = config.train.metrics_file or metrics
    by_env = {
        label: own if (own := evals / folder_of(label)).exists() else env.data_dir_to_save_evals or own
        for label, env in zip(labels_of(config.envs), config.envs, strict=True)
        if env.num_eval
    }
    return HistoryReader(
        metrics,
        evals if evals.exists() else config.env.data_dir_to_save_evals or evals,
        HealthFile(metrics.with_name(HEALTH_FILE)),  # the trainer writes it beside its metrics
        by_env,
    )


def read_evaluation(path: Path) -> Evaluation | None:
    """None for a file that is not (yet) a complete evaluation."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        step = int(values["step"])
        parts = {str(name): _read_figures(part, step) for name, part in (values.get("by_source") or {}).items()}
        return replace(
            _read_figures(values, step),
            by_source={source: replace(part, env=source) for source, part in parts.items()},
            samples=tuple(sample for sample in values.get("samples") or () if isinstance(sample, dict)),
            ended=None if values.get("ended") is None else float(values["ended"]),
            max_tokens=(values.get("generation_params") or {}).get("max_tokens"),
            policy_version=None if values.get("policy_version") is None else int(values["policy_version"]),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError):
        return None


def _read_figures(values: Mapping[str, Any], step: int) -> Evaluation:
    """Of an evaluation, or of its part from one data source; ValueError if a figure is not finite."""
    accuracy = float(values["accuracy"])
    low, high = (float(edge) for edge in values.get("interval_95") or (accuracy, accuracy))
    if not all(math.isfinite(number) for number in (accuracy, low, high)):
        raise ValueError(f"an accuracy of {accuracy}, {low} to {high}")
    bounds = [float(edge) for edge in values.get("mean_score_interval_95") or () if is_number(edge)]
    return Evaluation(
        step=step,
        accuracy=accuracy,
        low=low,
        high=high,
        num_right=int(values.get("num_right", 0)),
        num_prompts=int(values.get("num_prompts", 0)),
        mean_score=float(values["mean_score"]) if is_number(values.get("mean_score")) else None,
        score_low=bounds[0] if len(bounds) == 2 else None,
        score_high=bounds[1] if len(bounds) == 2 else None,
        num_unscored=int(values.get("num_unscored") or 0),
    )


def held_out_of(one: Evaluation) -> HeldOut:
    """An evaluation as a chart shows it."""
    return HeldOut(
        one.step, one.accuracy, one.low, one.high, one.mean_score, one.num_prompts, one.score_low, one.score_high,
        one.num_unscored,
    )  # fmt: skip


def is_scored(sample: Mapping[str, Any]) -> bool:
    """Whether an answer of an evaluation could be scored; one that could not is neither right nor wrong."""
    return sample.get("reward", 0.0) is not None


def is_number(value: object) -> TypeGuard[float]:
    """False for NaN, infinity and 10**400, which a damaged file may hold and no chart can show."""
    return isinstance(value, (int, float)) and abs(value) <= LARGEST_NUMBER


def _sum(step: Step, keys: Sequence[str]) -> float | None:
    """None if one of them was not measured."""
    values = [step.get(key) for key in keys]
    numbers = [float(value) for value in values if is_number(value)]
    return sum(numbers) if len(numbers) == len(values) else None


def _fingerprint(path: Path) -> tuple[str, int, int]:
    try:
        state = path.stat()
    except OSError:
        return str(path), 0, 0
    return str(path), state.st_size, state.st_mtime_ns


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Settings by dotted key: {"train": {"lr": 1e-5}} -> {"train.lr": 1e-5}."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        tables = {str(place): table for place, table in enumerate(value)} if name == "envs" and value else value
        is_section = isinstance(tables, dict) and name != "args"
        flat |= flatten(tables, f"{prefix}{name}.") if is_section else {prefix + name: value}
    return flat
