"""The launcher: plan (pure) -> local supervisor, live view, report. Bodies load when they are called."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from treadle.config.schema import RunConfig

__all__ = ["resume", "start"]


STOPPED_BY_USER = 130


def start(config: RunConfig, *, plain: bool, open_page: bool = False) -> int:
    """Run a whole job to its end; the exit code: 0 done, 130 stopped by the user."""
    from treadle.launch.job import start_run

    return 0 if start_run(config, plain=plain, open_page=open_page).is_complete else STOPPED_BY_USER


def resume(run_folder: Path, overrides: dict[str, Any], *, plain: bool, open_page: bool = False) -> int:
    """Continue the run in `run_folder`; `overrides` are the flags given now, such as {"steps": "80"}."""
    from treadle.launch.job import resume_run

    summary = resume_run(run_folder, overrides, plain=plain, open_page=open_page)
    return 0 if summary.is_complete else STOPPED_BY_USER
