"""The launcher: plan (pure) -> local supervisor, live view, report. Bodies load when they are called."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from treadle.config.schema import RunConfig

__all__ = ["chat", "doctor", "resume", "start", "top"]


def start(config: RunConfig, *, plain: bool, open_page: bool = False) -> int:
    """Run a whole job to its end; the exit code: 0 done, 130 stopped by the user."""
    from treadle.launch.job import start_run

    return start_run(config, plain=plain, open_page=open_page)


def resume(run_folder: Path, overrides: dict[str, Any], *, plain: bool, open_page: bool = False) -> int:
    """Continue the run in `run_folder`; `overrides` are the flags given now, such as {"steps": "80"}."""
    from treadle.launch.job import resume_run

    return resume_run(run_folder, overrides, plain=plain, open_page=open_page)


def top(run: Path | None, *, plain: bool, once: bool) -> int:
    """Show how a run goes that was started elsewhere; the newest in ./runs when `run` is None."""
    from treadle.launch.top import watch_run

    return watch_run(run, plain=plain, once=once)


def chat(model: str | None, *, message: str | None, temperature: float, max_tokens: int) -> int:
    """Talk to a run's result, a model folder or a model id; the newest run when `model` is None."""
    from treadle.launch.chat import talk

    return talk(model, message=message, temperature=temperature, max_tokens=max_tokens)
