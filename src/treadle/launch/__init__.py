"""Start and resume runs: plan (pure) -> processes under a supervisor, with a live view -> report.

Modules are imported when they are needed, because `treadle --help` imports this package.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from treadle.config.schema import RunConfig

__all__ = ["resume", "start"]


STOPPED_BY_USER = 130


def start(config: RunConfig, *, plain: bool, open_page: bool = False) -> int:
    """Run a job to its end. Exit code 0: done, 130: stopped by the user."""
    from treadle.launch.job import start_run

    return 0 if start_run(config, plain=plain, open_page=open_page).is_complete else STOPPED_BY_USER


def resume(run_folder: Path, overrides: dict[str, Any], *, plain: bool, open_page: bool = False) -> int:
    """Continue the run in `run_folder`; `overrides` are the flags given now, such as {"steps": "80"}."""
    from treadle.launch.job import resume_run

    summary = resume_run(run_folder, overrides, plain=plain, open_page=open_page)
    return 0 if summary.is_complete else STOPPED_BY_USER
