"""Run a command in its own process group; when standard input closes, kill the group and remove its scratch folder.

Standard input closes when the engine asks for it, and also when the engine is killed: vLLM's processes (server, core,
workers) never outlive it. Run as a file and with the standard library only, to keep the process small:

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
from types import FrameType

GRACE_S = 6.0  # time for the command to exit after SIGTERM, before its group is killed
_STDIN = 0


def main(scratch: str, argv: list[str]) -> int:
    wakeup_reader, wakeup_writer = os.pipe()
    os.set_blocking(wakeup_writer, False)
    signal.set_wakeup_fd(wakeup_writer)
    received = []

    def on_signal(number: int, _: FrameType | None) -> None:
        if number != signal.SIGCHLD:
            received.append(number)

    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    child = subprocess.Popen(argv, stdin=subprocess.DEVNULL, start_new_session=True)
    try:
        while child.poll() is None and not received:
            readable, _, _ = select.select([_STDIN, wakeup_reader], [], [])
            if wakeup_reader in readable:
                os.read(wakeup_reader, 512)
            if _STDIN in readable and not os.read(_STDIN, 512):
                break
        if child.poll() is None:
            child.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(timeout=GRACE_S)
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # the group is empty
            os.killpg(child.pid, signal.SIGKILL)
        shutil.rmtree(scratch, ignore_errors=True)
    return child.wait()


if __name__ == "__main__":
    code = main(sys.argv[1], sys.argv[2:])
    sys.exit(code if code >= 0 else 128 - code)
