"""What a run needs before its first process: the model on this disk."""

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
from treadle.errors import ModelError


def is_local(model: str) -> bool:
    return model == DEFAULT_MODEL or Path(model).expanduser().is_dir()


def prepare_model(model: str, verb: str = "run") -> str:
    """The folder of a model, fetched and converted where needed. Progress goes to the terminal, and errors, which name
    the flags of `verb`.

    A process of its own does it, because it needs torch and the launcher must stay small. When it fails it
    has already said why, so this ends with its exit code and says nothing more.
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


@contextmanager
def ending_on_sigterm() -> Iterator[None]:
    """`kill` ends the launcher through an exception, so that the process it waits for is ended too."""

    if threading.current_thread() is not threading.main_thread():  # only that one may have handlers
        yield
        return

    def end(_number: int, _frame: object) -> NoReturn:
        raise SystemExit(128 + signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
