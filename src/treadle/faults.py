"""Faults on purpose, for tests: `TREADLE_FAULT=store:before_commit:3:kill9` ends the process at the third passage.

The points are named where they stand in the code. Without the variable a passage costs one comparison.
`TREADLE_LATE=the batch of step:3` shortens the deadline of waits whose name contains the text to 3 seconds.
"""

from __future__ import annotations

import os
import signal
import time

VARIABLE = "TREADLE_FAULT"
LATE_VARIABLE = "TREADLE_LATE"
POINTS = (
    "store:before_commit",  # the rows are written, nothing is durable
    "store:after_commit",  # durable, not answered yet
    "store:forming",  # a batch is chosen, its record not yet committed
    "store:renewing",
    "store:checkpoint",  # the log is about to be folded into the file
    "hub:before_reply",  # the answer is made, not sent
    "hub:stopping",  # stop requested, the queue is still open
)
ENGINE_POINTS = (
    "engine:step",  # about to compute the next token of everything that runs
    "engine:release",  # the new weights are there, the engine still held
)


class Injected(Exception):
    """What the action `raise` raises."""


_wanted = os.environ.get(VARIABLE, "")
_late, _, _late_s = os.environ.get(LATE_VARIABLE, "").rpartition(":")
_passed = 0


def deadline_of(wait: str, usual_s: float) -> float:
    """The seconds after which a wait is late."""
    return float(_late_s) if _late and _late in wait else usual_s


def reach(point: str) -> None:
    """Pass a named point. Actions: kill9, exit, raise, sleep (an hour: until somebody kills the process), and slow:
    `TREADLE_FAULT=engine:step:0.1:slow` sleeps for 0.1 seconds at every passage."""
    if not _wanted or not _wanted.startswith(f"{point}:"):
        return
    global _passed  # noqa: PLW0603 - one count a process is what the variable speaks of
    _passed += 1
    nth, _, action = _wanted.removeprefix(f"{point}:").partition(":")
    if action == "slow":
        time.sleep(float(nth))
        return
    if _passed != int(nth):
        return
    if action == "kill9":
        os.kill(os.getpid(), signal.SIGKILL)
    elif action == "exit":
        os._exit(1)
    elif action == "sleep":
        time.sleep(3600)
    raise Injected(point)
