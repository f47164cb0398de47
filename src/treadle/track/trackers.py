"""Send the metrics of a run to several trackers: the JSONL file, and the services that the settings name."""

from __future__ import annotations

import importlib.util
import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from treadle.config.train import TrackOptions
from treadle.errors import MissingExtra, Problems, TreadleError
from treadle.log import get_logger
from treadle.track.catalogue import with_aliases
from treadle.track.files import JsonlTracker, read_steps

DEFAULT_PROJECT = "treadle"
MAX_FAILURES_IN_A_ROW = 10
_EXTRAS = {"tensorboard": "trackers", "wandb": "trackers", "trackio": "trackio"}
Metric = float | int | str
log = get_logger("track")


class Tracker(Protocol):
    """What the training loop needs: one call per optimizer step, with one dict under our names."""

    def log(self, step: int, metrics: Mapping[str, Metric]) -> None:
        """Record the metrics of one step: `log(3, {"reward": 0.25})`."""

    def truncate_after(self, step: int) -> None:
        """Remove all steps after `step`, which a resumed run repeats."""

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
    """Identity of a run at a service; the id is kept in a file, so that a resumed run continues there."""

    id: str
    folder: Path  # the service's own files go here
    project: str
    name: str
    group: str | None
    config: Mapping[str, Any]
    sent_until: int  # the last step that was sent before a restart; -1 for a new run


class AppendOnlyTracker:
    """A run at a service that cannot remove steps: steps that it has are not sent again."""

    _run: Any  # the service's own object, with `log(values, step=)`
    _make_table: Callable[..., Any]  # the service's own type of table, from columns and data

    def __init__(self, identity: RunIdentity) -> None:
        self._sent_before = identity.sent_until
        self._newest = identity.sent_until

    def log(self, step: int, metrics: Mapping[str, Metric]) -> None:
        self._send(step, lambda: finite_numbers(metrics))

    def log_table(self, step: int, table: Table) -> None:
        rows = [list(row) for row in table.rows]
        self._send(step, lambda: {table.name: self._make_table(columns=list(table.columns), data=rows)})

    def _send(self, step: int, values: Callable[[], Mapping[str, Any]]) -> None:
        if step > self._sent_before and step >= self._newest:  # figures and tables of one step may come one by one
            self._run.log(dict(values()), step=step)
            self._newest = step

    def truncate_after(self, step: int) -> None:
        return  # see `_send`


def finite_numbers(metrics: Mapping[str, Metric]) -> dict[str, float]:
    """The values that can be drawn: no text, no NaN and no infinity."""
    numbers = {name: float(value) for name, value in metrics.items() if not isinstance(value, str)}
    return {name: value for name, value in numbers.items() if math.isfinite(value)}


def build_tracker(config: TrackOptions, metrics_file: Path, resolved: Mapping[str, Any]) -> CompositeTracker:
    """Open every tracker that `config` names; `resolved` is what a service shows as the run's settings.

    `build_tracker(TrackOptions(track="tensorboard"), Path("runs/one/metrics.jsonl"), {"lr": 3e-5})` writes
    runs/one/metrics.jsonl and runs/one/tensorboard/.
    """
    if config.unused_name:
        log.warning("no_tracker", note=config.unused_name)
    last_step = max((int(step["step"]) for step in read_steps(metrics_file)), default=-1)
    folder = metrics_file.resolve().parent
    folder.mkdir(parents=True, exist_ok=True)
    opened: dict[str, TableTracker | None] = {
        name: _open(name, config, folder, resolved, last_step) for name in config.track
    }
    sinks = {name: sink for name, sink in opened.items() if sink is not None}
    return CompositeTracker(JsonlTracker(metrics_file), sinks, config.metric_aliases)


def check_sinks(config: TrackOptions, env: Mapping[str, str]) -> None:
    """Refuse sinks that could not be opened: a package is missing, or W&B has no key. Imports none of them."""
    problems = Problems()
    for name in config.track:
        with problems.collected():
            if importlib.util.find_spec(name) is None:
                raise MissingExtra(f"--track {name} needs {name}", fix=f"pip install 'treadle[{_EXTRAS[name]}]'")
            if name == "wandb":
                from treadle.track.services import check_login

                check_login(env)
    problems.raise_all()


def group_of(config: TrackOptions, metrics_file: Path) -> str:
    """The group at W&B or Trackio that the runs of the trainer and its environments are in."""
    return config.wandb_group or config.wandb_run_name or metrics_file.resolve().parent.name


class CompositeTracker:
    """Passes every call to all trackers. The file must work; failures of other trackers do not stop the training."""

    def __init__(self, file: Tracker, others: Mapping[str, TableTracker], dialects: Sequence[str] = ()) -> None:
        self._file = file
        self._others = dict(others)
        self._dialects = tuple(dialects)
        self._failures = dict.fromkeys(others, 0)  # in a row
        self._has_warned: set[str] = set()

    def log(self, step: int, metrics: Mapping[str, Metric]) -> None:
        named = with_aliases(metrics, self._dialects)
        self._file.log(step, named)
        self._each(lambda sink: sink.log(step, named))

    def log_table(self, step: int, table: Table) -> None:
        """For the sinks that show tables; the file has figures only."""
        self._each(lambda sink: sink.log_table(step, table))

    def truncate_after(self, step: int) -> None:
        self._file.truncate_after(step)
        self._each(lambda sink: sink.truncate_after(step))

    def close(self) -> None:
        try:
            self._file.close()
        finally:
            self._each(lambda sink: sink.close())

    def _each(self, act: Callable[[TableTracker], None]) -> None:
        for name, sink in list(self._others.items()):
            try:
                act(sink)
                self._failures[name] = 0
            except Exception as error:
                self._failures[name] += 1
                if name not in self._has_warned:
                    note = "training goes on; metrics.jsonl has it all"
                    log.warning("sink_failed", sink=name, error=repr(error), note=note)
                    self._has_warned.add(name)
                if self._failures[name] == MAX_FAILURES_IN_A_ROW:  # each try may cost a timeout
                    log.warning("sink_given_up", sink=name, failures_in_a_row=MAX_FAILURES_IN_A_ROW)
                    del self._others[name]


def _open(
    name: str, config: TrackOptions, folder: Path, resolved: Mapping[str, Any], last_step: int
) -> TableTracker | None:
    """None for a service that cannot be reached now: a wrong setting is an error, a network problem is not."""
    try:
        if name == "tensorboard":
            from treadle.track.services import TensorboardTracker

            return TensorboardTracker(folder / "tensorboard")
        return _open_service(name, config, folder, resolved, last_step)
    except TreadleError:
        raise
    except Exception as error:
        log.warning("sink_failed", sink=name, error=repr(error), note="training goes on without it")
        return None


def _open_service(
    name: str, config: TrackOptions, folder: Path, resolved: Mapping[str, Any], last_step: int
) -> TableTracker:
    """Continues the run whose id an earlier process left beside the metrics."""
    id_file = folder / f"{name}-run-id.txt"
    known_id = id_file.read_text(encoding="utf-8").strip() if id_file.exists() else ""
    identity = RunIdentity(
        id=known_id or secrets.token_hex(4),
        folder=folder,
        project=config.wandb_project or DEFAULT_PROJECT,
        name=config.wandb_run_name or folder.name,
        group=group_of(config, folder / "metrics.jsonl"),
        config=resolved,
        sent_until=last_step if known_id else -1,
    )
    from treadle.track.services import TrackioTracker, WandbTracker

    kinds: dict[str, Callable[[RunIdentity], TableTracker]] = {"wandb": WandbTracker, "trackio": TrackioTracker}
    tracker = kinds[name](identity)
    id_file.write_text(identity.id + "\n", encoding="utf-8")  # only now: a service that was not reached has no run
    return tracker
