"""Entry point of a sandboxed process: `python -P -s -S child.py FD`, where FD is an open file with its job as JSON.

It reads the job, restricts itself, and only then runs untrusted code.
"""

from __future__ import annotations

import json
import os
import sys
import types
from collections.abc import Callable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

NOT_RESTRICTED = 97  # exit code: this system lacks a restriction; standard error has its name


def main(job_fd: int) -> None:
    _find_own_modules()
    from treadle.envs.sandbox.restrict import restrict_process

    with os.fdopen(job_fd, "rb") as file:
        job: dict[str, Any] = json.loads(file.read())
    devnull = os.open(os.devnull, os.O_RDWR)
    run = _prepare(job, devnull)
    missing = restrict_process(job["limits"], parent=job["parent"])
    if missing and not job["allow_weak"]:
        print("; ".join(missing), file=sys.stderr, flush=True)
        os._exit(NOT_RESTRICTED)
    os.dup2(devnull, 2)
    sys.set_int_max_str_digits(0)  # a number of 5000 digits may be right
    run()


def _prepare(job: dict[str, Any], devnull: int) -> Callable[[], None]:
    """Import and open what the job needs, while that is still possible."""
    if job["role"] == "program":
        return lambda: _run_program(job["source"])
    from treadle.envs.sandbox.python_tests import JsonPipe

    pipe = JsonPipe(os.dup(0), os.dup(1))
    os.dup2(devnull, 0)  # untrusted code reads nothing and prints nowhere
    os.dup2(devnull, 1)
    if job["role"] == "answer":
        from treadle.envs.sandbox.python_tests import serve_answer

        return lambda: serve_answer(job["source"], pipe)
    from treadle.envs.sandbox.python_tests import run_tests

    verdicts = JsonPipe(os.dup(devnull), job["verdict_fd"])
    return lambda: run_tests(job["tests"], job["names"], pipe, verdicts.send)


def _run_program(source: str) -> None:
    """Run the source like a script."""
    sys.argv[:] = ["answer.py"]
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    exec(compile(source, "answer.py", "exec"), module.__dict__)  # noqa: S102  # restricted


def _find_own_modules() -> None:
    """Make `treadle.envs.sandbox` importable without the imports of `treadle` and `treadle.envs`: halves the start."""
    folder = os.path.dirname(os.path.abspath(__file__))
    for name in ("treadle.envs.sandbox", "treadle.envs", "treadle"):
        package = types.ModuleType(name)
        package.__path__ = [folder]
        sys.modules[name] = package
        folder = os.path.dirname(folder)


if __name__ == "__main__":
    main(int(sys.argv[1]))
