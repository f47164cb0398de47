"""Log evaluations and some rollouts of an environment to the trackers that the trainer uses.

An environment is a separate run there, in the trainer's group, because its last evaluation comes after the trainer has
ended. Its files are in state_dir/NAME/tracker-RUN. Errors of a tracker are logged and stop nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

from treadle.config.env import EnvConfig
from treadle.config.load import parse
from treadle.config.secret_settings import without_secrets
from treadle.config.train import TrackOptions
from treadle.envs.evaluation import EvalResult, eval_metrics
from treadle.envs.rollout import Rollout
from treadle.errors import TreadleError
from treadle.log import get_logger
from treadle.track.trackers import CompositeTracker, Table, build_tracker
from treadle.wire.hub import RegisteredEnv

log = get_logger("env")

STEPS_PER_TABLE = 10  # between two tables of training rollouts; an evaluation logs one too
MAX_CELL_CHARS = 2000
ROLLOUT_COLUMNS = ("policy_version", "prompt", "completion", "reward", "is_right", "tokens", "ended")
SAMPLE_COLUMNS = ("question", "completion", "gold", "reward", "is_right", "ended")


def open_tracking(config: EnvConfig, name: str, registered: RegisteredEnv) -> Tracking:
    """Open the sinks that the trainer registered with; may take seconds."""
    if not config.use_trackers or not registered.trackers.sinks:
        return Tracking(None, 0)
    folder = config.state_dir / quote(name, safe="") / f"tracker-{quote(registered.run_id, safe='')[:8]}"
    try:
        options = {
            "track": registered.trackers.sinks,
            "wandb_project": registered.trackers.project or None,
            "wandb_group": registered.trackers.group or None,
            "wandb_run_name": name,
        }
        settings = without_secrets(config.model_dump(mode="json"))
        track = parse(TrackOptions, options, source="the trainer's registration")
        tracker = build_tracker(track, Path(folder, "metrics.jsonl"), settings)
    except TreadleError as error:  # the package is missing on this machine, or there is no login
        log.warning("no_tracker", problem=error.message, fix=f"{error.fix}; or turn it off: --env.use-trackers false")
        return Tracking(None, 0)
    except OSError as error:
        fix = "give a folder that can be written to: --env.state-dir; or turn it off: --env.use-trackers false"
        log.warning("no_tracker", problem=str(error), fix=fix)
        return Tracking(None, 0)
    log.info("tracking", sinks=",".join(registered.trackers.sinks), folder=str(folder))
    return Tracking(tracker, config.num_rollouts_to_keep)


class Tracking:
    """`Tracking(None, 0)` logs nothing."""

    def __init__(self, tracker: CompositeTracker | None, num_rows: int) -> None:
        self._tracker = tracker
        self._num_rows = num_rows
        self._rollouts: deque[tuple[Any, ...]] = deque(maxlen=num_rows)
        self._next_table = STEPS_PER_TABLE

    def add(self, rollouts: Sequence[Rollout], *, may_log: bool) -> None:
        """Add the first rollout of a delivered group to the next table.

        While an evaluation runs, nothing is logged: its step is lower, and tracking services need increasing steps.
        """
        if self._tracker is None or not self._num_rows or not rollouts or not rollouts[0].transcripts:
            return
        self._rollouts.append(_row(rollouts[0]))
        version = self._rollouts[-1][0]
        if may_log and version >= self._next_table:
            self._log_rollouts(version)

    def log_evaluation(self, result: EvalResult) -> None:
        if self._tracker is None:
            return
        with _only_logged():
            self._tracker.log(result.step, eval_metrics(result))
        if self._num_rows and result.samples:
            firsts = result.samples[:: result.generation_params["n"]][: self._num_rows]
            rows = [
                (_cut(one.question), _cut(one.completion), _cut(one.gold), one.reward, one.is_right, one.ended)
                for one in firsts
            ]
            self._tracker.log_table(result.step, Table("eval/samples", SAMPLE_COLUMNS, rows))
        self._log_rollouts(result.step)

    def close(self) -> None:
        if self._tracker is not None:
            with _only_logged():
                self._tracker.close()

    def _log_rollouts(self, step: int) -> None:
        self._next_table = step + STEPS_PER_TABLE
        if self._tracker is not None and self._rollouts:
            self._tracker.log_table(step, Table("train/rollouts", ROLLOUT_COLUMNS, list(self._rollouts)))


@contextmanager
def _only_logged() -> Iterator[None]:
    """Log errors of the metrics file; the other sinks never raise."""
    try:
        yield
    except (TreadleError, OSError) as error:
        log.warning("tracking_failed", problem=str(error))


def _row(rollout: Rollout) -> tuple[Any, ...]:
    first = rollout.transcripts[0]
    said = [str(message.get("content", "")) for message in first.messages if message.get("role") != "assistant"]
    return (
        max((version for transcript in rollout.transcripts for version in transcript.policy_versions), default=0),
        _cut("\n".join(said)),
        _cut(rollout.text),
        rollout.score.reward,
        rollout.score.is_right,
        rollout.num_sampled,
        not rollout.is_truncated,
    )


def _cut(text: str) -> str:
    return text if len(text) <= MAX_CELL_CHARS else text[:MAX_CELL_CHARS] + " ..."
