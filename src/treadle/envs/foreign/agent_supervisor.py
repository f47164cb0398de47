"""Parent process of one agent: kills everything that the agent started, however the agent ends. Started by agent.py.

python -I -S agent_supervisor.py LIFELINE PROGRAM ARGUMENT...

LIFELINE is the descriptor of a pipe. When its other end is closed, also by the death of its owner (even by SIGKILL),
the agent is killed. At the end, the last bytes of its output go to standard output; the exit code is the agent's.

Every rollout starts one of these, so it imports very little, and nothing of treadle.
"""

from __future__ import annotations

import os
import select
import signal
import sys

TAIL_BYTES = 2000  # of its output, to be shown if it fails
CANNOT_START = 127  # as in shells
KILLED = 128  # plus the signal number, as in shells
LOOK_AROUND_S = 0.2  # poll interval on systems without a subreaper
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # <linux/prctl.h>
STOP = frozenset((signal.SIGTERM, signal.SIGINT, signal.SIGHUP))
IS_LINUX = sys.platform == "linux"


def main(lifeline: int, command: list[str]) -> int:
    os.set_inheritable(lifeline, False)
    _prctl(PR_SET_CHILD_SUBREAPER, 1)  # orphaned descendants become children of this process, in any session
    wake_up, woken = os.pipe()
    os.set_blocking(woken, False)
    signal.set_wakeup_fd(woken)
    for number in (signal.SIGCHLD, *STOP):
        signal.signal(number, lambda *_: None)  # without a handler, nothing is written to `woken`
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
                waiting_for.remove(printed)  # it closed its output and continues
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
    """Become the agent, in a new session: signals to its process group must not reach the supervisor."""
    try:
        os.setsid()
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # if it kills the supervisor, it dies too
        os.dup2(output, 1)
        os.dup2(output, 2)
        for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores these, and programs inherit that
            signal.signal(number, signal.SIG_DFL)
        os.execvp(command[0], command)  # noqa: S606 - the user's own command
    except OSError as error:
        os.write(2, f"cannot start '{command[0]}': {error.strerror}".encode())
    finally:
        os._exit(CANNOT_START)


def _reap(agent: int) -> int | None:
    """Reap all ended children; returns the agent's exit code if it is among them."""
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
    """Kill all descendants, repeatedly, because orphans become children, until none is left."""
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
    """All descendants of a process."""
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
        pass  # a process that cannot be killed still has it open
    return tail


def _prctl(option: int, value: int) -> None:
    if IS_LINUX:
        import ctypes

        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
