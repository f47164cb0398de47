"""Find or prepare the folder of a model: fetched and converted, or the result of a run."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from treadle.config import DEFAULT_MODEL
from treadle.engines.model_folder import is_adapter
from treadle.errors import ModelError
from treadle.launch.folder import is_run, result_of
from treadle.report.summary import find_result


def is_local(model: str) -> bool:
    return model == DEFAULT_MODEL or Path(model).expanduser().is_dir()


def prepare_model(model: str, verb: str = "run") -> str:
    """The folder of a model, fetched and converted if needed. Progress goes to the terminal, and errors with the flags
    of `verb`.

    This runs in a process of its own, because it needs torch and the launcher must stay small. If it fails it has
    printed the reason, so the launcher ends with the same exit code.
    """
    typed = [word.partition("=")[0] for word in sys.argv[1:] if word.startswith("--")]
    with ending_on_sigterm():
        done = subprocess.run(
            [sys.executable, "-m", "treadle.engines.models", model, verb, *typed],
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
    if done.returncode != 0:
        raise SystemExit(done.returncode if done.returncode > 0 else 1)
    lines = done.stdout.strip().splitlines()
    if not lines:
        raise ModelError(f"the folder of the model '{model}' could not be found out", fix="check --model")
    return lines[-1].strip()


def find_model(model: str | None, runs: Path) -> Path:
    """The folder to load: the result of a run, a folder with a model or an adapter, or the prepared model of an id."""
    if model is None:
        return _newest_result(runs)
    folder = Path(model).expanduser()
    if not folder.exists() and folder.parent.name == runs.name:
        raise ModelError(f"there is no run {model}", fix="name the folder that `treadle run` printed when it began")
    if is_run(folder):
        return result_of(folder)
    if is_adapter(folder):
        return folder.resolve()
    return Path(prepare_model(model, "chat"))


def _newest_result(runs: Path) -> Path:
    found = [result for folder in runs.glob("*/checkpoints") if (result := find_result(folder)) is not None]
    if not found:
        raise ModelError(
            f"there is no finished run in {runs}/",
            fix="name a run, a model folder or an id: treadle chat MODEL",
        )
    return max(found, key=lambda result: result.stat().st_mtime_ns).resolve()


@contextmanager
def ending_on_sigterm() -> Iterator[None]:
    """Turn SIGTERM into SystemExit, so that the process that the launcher waits for is ended too."""

    if threading.current_thread() is not threading.main_thread():  # only the main thread may set handlers
        yield
        return

    def end(_number: int, _frame: object) -> NoReturn:
        raise SystemExit(128 + signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
