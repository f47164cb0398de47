"""The parent of one agent: ends everything that it started, however it ends itself. Started by agent_process.

python -I -S keeper.py LIFELINE PROGRAM ARGUMENT...

LIFELINE is the number of an open pipe. When its other end is closed, or whoever held it is dead (even by SIGKILL), the
agent's time is up. At the end, the last bytes of what was printed go to standard output; the exit code is the agent's.

Every rollout starts one of these, so it imports next to nothing, and nothing of treadle.
"""

from __future__ import annotations

import os
import select
import signal
import sys

TAIL_BYTES = 2000  # of what it printed, to be shown when it fails
CANNOT_START = 127  # as shells have it
KILLED = 128  # and the signal's number, likewise
LOOK_AROUND_S = 0.2  # where the system does not hand us the orphans
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # <linux/prctl.h>
STOP = frozenset((signal.SIGTERM, signal.SIGINT, signal.SIGHUP))
IS_LINUX = sys.platform == "linux"


def main(lifeline: int, command: list[str]) -> int:
    os.set_inheritable(lifeline, False)
    _prctl(PR_SET_CHILD_SUBREAPER, 1)  # orphans below us become our children, in whatever session they are
    wake_up, woken = os.pipe()
    os.set_blocking(woken, False)
    signal.set_wakeup_fd(woken)
    for number in (signal.SIGCHLD, *STOP):
        signal.signal(number, lambda *_: None)  # a handler, or nothing would be written to `woken`
    printed, output = os.pipe()
    agent = os.fork()
    if agent == 0:
        _become(command, output)
    os.close(output)
    exit_code, is_stopped, tail, known = None, False, b"", set[int]()
    waiting_for = [lifeline, wake_up, printed]
    while exit_code is None:
        ready, _, _ = select.select(waiting_for, (), (), None if IS_LINUX else LOOK_AROUND_S)
        if not IS_LINUX:
            known |= _below(agent)
        if printed in ready:
            chunk = os.read(printed, 1 << 16)
            tail = (tail + chunk)[-TAIL_BYTES:]
            if not chunk:
                waiting_for.remove(printed)  # it closed its output, and runs on
        if wake_up in ready:
            is_stopped = not STOP.isdisjoint(os.read(wake_up, 1 << 10))
            exit_code = _reap(agent)
        if is_stopped or lifeline in ready:
            break
    _end_all(known)
    os.set_blocking(printed, False)
    os.write(1, _rest(printed, tail))
    return KILLED + signal.SIGKILL if exit_code is None else exit_code


def _become(command: list[str], output: int) -> None:
    """The agent itself, in a session of its own: what it does to its process group must not reach us."""
    try:
        os.setsid()
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # should it find and kill us, it goes first
        os.dup2(output, 1)
        os.dup2(output, 2)
        for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores these, and a program would inherit that
            signal.signal(number, signal.SIG_DFL)
        os.execvp(command[0], command)  # noqa: S606 - the user's own command
    except OSError as error:
        os.write(2, f"cannot start '{command[0]}': {error.strerror}".encode())
    finally:
        os._exit(CANNOT_START)


def _reap(agent: int) -> int | None:
    """Take note of all that have ended; the agent's exit code, if it is among them."""
    exit_code = None
    try:
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == agent:
                code = os.waitstatus_to_exitcode(ended[1])
                exit_code = code if code >= 0 else KILLED - code
    except ChildProcessError:
        pass
    return exit_code


def _end_all(known: set[int]) -> None:
    """Kill whatever is below us, and again what came to us through that, until nothing is left."""
    while True:
        for pid in _below(os.getpid()) | known:
            try:
                os.kill(pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                continue
        known = set()
        try:
            os.waitpid(-1, 0)
            _reap(agent=0)
        except ChildProcessError:
            return


def _below(pid: int) -> set[int]:
    """All processes that this one started, and those that they started."""
    if not IS_LINUX:
        import psutil  # type: ignore[import-untyped]

        try:
            return {child.pid for child in psutil.Process(pid).children(recursive=True)}
        except psutil.NoSuchProcess:
            return set()
    children: dict[int, list[int]] = {}
    for name in filter(str.isdecimal, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat", "rb") as stat:
                parent = int(stat.read().rpartition(b")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has just ended
        children.setdefault(parent, []).append(int(name))
    found, to_visit = set[int](), [pid]
    while to_visit:
        new = children.get(to_visit.pop(), [])
        found.update(new)
        to_visit += new
    return found


def _rest(printed: int, tail: bytes) -> bytes:
    try:
        while chunk := os.read(printed, 1 << 16):
            tail = (tail + chunk)[-TAIL_BYTES:]
    except BlockingIOError:
        pass  # something that cannot be killed still holds it
    return tail


def _prctl(option: int, value: int) -> None:
    if IS_LINUX:
        import ctypes

        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
