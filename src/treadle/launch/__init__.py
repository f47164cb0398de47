"""Start and resume runs: plan (pure) -> processes under a supervisor, with a live view -> report.

Modules are imported when they are needed, because `treadle --help` imports this package.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from treadle.config.schema import RunConfig

__all__ = ["Submission", "resume", "start"]


STOPPED_BY_USER = 130


@dataclass(frozen=True)
class Submission:
    """What a scheduler needs to start the launcher of a run: the `words` of the command line after `treadle run`, its
    flags (`given`), and whether the user only wants to see it (`is_dry`)."""

    words: Sequence[str]
    given: Mapping[str, object]
    is_dry: bool = False


def start(config: RunConfig, *, plain: bool, open_page: bool = False, submission: Submission | None = None) -> int:
    """Run a job to its end, or submit it. Exit code 0: done, 130: stopped by the user."""
    if submission is not None and _is_submitted(config, submission):
        return _submit(config, submission, None)
    from treadle.launch.job import start_run

    return 0 if start_run(config, plain=plain, open_page=open_page).is_complete else STOPPED_BY_USER


def resume(
    run_folder: Path,
    overrides: dict[str, Any],
    *,
    plain: bool,
    open_page: bool = False,
    submission: Submission | None = None,
) -> int:
    """Continue the run in `run_folder`, or submit that; `overrides` are the flags given now: {"steps": "80"}."""
    from treadle.launch.folder import saved_config
    from treadle.launch.job import resume_run

    config = None if submission is None else saved_config(run_folder, overrides)
    if config is not None and submission is not None and _is_submitted(config, submission):
        return _submit(config, submission, run_folder)
    summary = resume_run(run_folder, overrides, plain=plain, open_page=open_page)
    return 0 if summary.is_complete else STOPPED_BY_USER


def _is_submitted(config: RunConfig, submission: Submission) -> bool:
    """Whether a scheduler starts the launcher of this run later, on one of its machines."""
    from treadle.launch.slurm import is_inside

    scheduler = config.cluster.scheduler
    return submission.is_dry or scheduler == "k8s" or (scheduler == "slurm" and not is_inside())


def _submit(config: RunConfig, submission: Submission, run_folder: Path | None) -> int:
    from treadle.launch.submission import submit_run

    submit_run(config, submission.words, submission.given, is_dry=submission.is_dry, run_folder=run_folder)
    return 0
