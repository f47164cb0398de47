"""What a fenced-in process does, from its first line on: `python -P -s -S child.py FD`, where FD holds its orders.

It reads its orders, takes its own rights away, and only then runs foreign code.
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

NOT_FENCED = 97  # exit code: this system lacks a fence; standard error says which


def main(orders_fd: int) -> None:
    _find_own_modules()
    from treadle.envs.sandbox.fence import fence_in

    with os.fdopen(orders_fd, "rb") as file:
        orders: dict[str, Any] = json.loads(file.read())
    nowhere = os.open(os.devnull, os.O_RDWR)
    carry_out = _prepare(orders, nowhere)
    missing = fence_in(orders["limits"], parent=orders["parent"])
    if missing and not orders["allow_weak"]:
        print("; ".join(missing), file=sys.stderr, flush=True)
        os._exit(NOT_FENCED)
    os.dup2(nowhere, 2)
    sys.set_int_max_str_digits(0)  # a number of 5000 digits may be the right one
    carry_out()


def _prepare(orders: dict[str, Any], nowhere: int) -> Callable[[], None]:
    """Import and open whatever the orders need, as long as that is possible."""
    if orders["role"] == "program":
        return lambda: _run_program(orders["source"])
    from treadle.envs.sandbox.values import Line

    line = Line(os.dup(0), os.dup(1))
    os.dup2(nowhere, 0)  # what foreign code reads and prints goes nowhere
    os.dup2(nowhere, 1)
    if orders["role"] == "answer":
        from treadle.envs.sandbox.answer import serve_answer

        return lambda: serve_answer(orders["source"], line)
    from treadle.envs.sandbox.examiner import run_tests

    verdicts = Line(os.dup(nowhere), orders["verdict_fd"])
    return lambda: run_tests(orders["tests"], orders["names"], line, verdicts.send)


def _run_program(source: str) -> None:
    """As if it had been started as a script."""
    sys.argv[:] = ["answer.py"]
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    exec(compile(source, "answer.py", "exec"), module.__dict__)  # noqa: S102  # fenced in


def _find_own_modules() -> None:
    """Let `treadle.envs.sandbox` be imported without what `treadle` and `treadle.envs` import: starting takes half."""
    folder = os.path.dirname(os.path.abspath(__file__))
    for name in ("treadle.envs.sandbox", "treadle.envs", "treadle"):
        package = types.ModuleType(name)
        package.__path__ = [folder]
        sys.modules[name] = package
        folder = os.path.dirname(folder)


if __name__ == "__main__":
    main(int(sys.argv[1]))
