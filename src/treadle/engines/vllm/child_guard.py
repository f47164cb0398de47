"""Runs a command in a process group of its own; when standard input closes, ends the group and removes its folder.

That happens when the engine says so, and also when the engine was killed and could not say anything: vLLM's processes
(the server, its core, its workers) never outlive it. Run as a file with only Python's own library, so that it is small:

    python -I child_guard.py SCRATCH_FOLDER COMMAND...
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from types import FrameType

GRACE_S = 6.0  # for the command to end by itself; then its group is killed
_STDIN = 0


def main(scratch: str, argv: list[str]) -> int:
    told, teller = os.pipe()
    os.set_blocking(teller, False)
    signal.set_wakeup_fd(teller)
    asked_to_end = []

    def note(number: int, _: FrameType | None) -> None:
        if number != signal.SIGCHLD:
            asked_to_end.append(number)

    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT):
        signal.signal(number, note)
    child = subprocess.Popen(argv, stdin=subprocess.DEVNULL, start_new_session=True)
    try:
        while child.poll() is None and not asked_to_end:
            readable, _, _ = select.select([_STDIN, told], [], [])
            if told in readable:
                os.read(told, 512)
            if _STDIN in readable and not os.read(_STDIN, 512):
                break
        _end(child)
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # nobody is left in it
            os.killpg(child.pid, signal.SIGKILL)
        shutil.rmtree(scratch, ignore_errors=True)
    return child.wait()


def _end(child: subprocess.Popen[bytes]) -> None:
    if child.poll() is None:
        child.terminate()
        deadline = time.monotonic() + GRACE_S
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(timeout=deadline - time.monotonic())


if __name__ == "__main__":
    code = main(sys.argv[1], sys.argv[2:])
    sys.exit(code if code >= 0 else 128 - code)
