"""A process of a run as the launcher sees it: start it, end it, and say why it ended."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

from treadle.errors import ProcessDied, TreadleError, UserError
from treadle.launch.placement import Placement
from treadle.launch.process_spec import ProcessSpec
from treadle.launch.restarts import RankEnd

NUM_TAIL_LINES = 20
KILLED = ", perhaps out of memory"  # said of a process that ended by SIGKILL
_USER_ERROR_CODE = 2
_OWN_ERROR = re.compile(r"^treadle[\w -]*: (?P<message>.+)$")
_REMEDY = "  -> "
# Stack dumps of faulthandler and watch/stacks.py are no error messages.
_STACK_LINE = re.compile(r'(  File ".*", line \d+ in |(Current thread|Thread) 0x[0-9a-f]+ |\d+ tasks? at )')


class ChildProcess:
    """A process of the run, and the part of its log that it has written since it was started."""

    def __init__(self, spec: ProcessSpec, placement: Placement) -> None:
        self.spec = spec
        self._was_asked_to_end = False
        spec.log_path.parent.mkdir(parents=True, exist_ok=True)
        self._log_start = spec.log_path.stat().st_size if spec.log_path.exists() else 0
        self._handle = placement.start(spec)

    @property
    def pid(self) -> int | None:
        """None if it is not on this machine."""
        return self._handle.pid

    @property
    def reported_pid(self) -> int | None:
        """By which it reports to the hub; None if that is not known."""
        return self._handle.reported_pid

    def poll(self) -> int | None:
        """The exit code, or None while it runs."""
        return self._handle.poll()

    def terminate(self) -> None:
        """Send SIGTERM, once, to it alone; it stops its own children."""
        if self.poll() is None and not self._was_asked_to_end:
            self._was_asked_to_end = True
            self._handle.terminate()

    def kill(self) -> None:
        """Kill it and what it has started."""
        self._handle.kill()

    def rank_end(self) -> RankEnd:
        """How this process ended."""
        tail = tail_of(self.spec.log_path, start=self._log_start)
        has_own = any(map(_OWN_ERROR.match, tail))
        code = self.poll() or 0
        return RankEnd(self.spec.name, code, last_words(tail)[0] if has_own else "", describe_exit(code), tuple(tail))

    def exit_error(self, why: str = "", note: str = "") -> TreadleError:
        """Why it ended: its own message for an error of the user, else the end of its log; `note` is added to it."""
        code = self.poll()
        tail = tail_of(self.spec.log_path, start=self._log_start)  # since it was started
        if code == _USER_ERROR_CODE and not why:
            message, fix = last_words(tail)
            return UserError(message or f"{self.spec.name} refused its settings", fix=fix)
        quoted = "\n".join(f"  | {line}" for line in tail) or "  | (nothing)"
        return ProcessDied(
            f"{self.spec.name} {why or 'died'} ({describe_exit(code)}){note}; the end of its log:\n{quoted}",
            fix=f"the whole log is {self.spec.log_path}",
        )


def tail_of(path: Path, *, start: int = 0, num_lines: int = NUM_TAIL_LINES) -> list[str]:
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(start, size - 64 * 1024))
            text = file.read().decode("utf-8", errors="replace")
    except OSError:
        return []
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    return [line for line in lines if not _STACK_LINE.match(line)][-num_lines:]


def last_words(lines: list[str]) -> tuple[str, str]:
    """(message, fix) of the last error in a log.

    >>> last_words(["loading", "treadle: no model 'smol'", "  -> check --model"])
    ("no model 'smol'", 'check --model')
    """
    for number in range(len(lines) - 1, -1, -1):
        found = _OWN_ERROR.match(lines[number])
        if found is None:
            continue
        message, fix = [found["message"]], ""
        for line in lines[number + 1 :]:
            if line.startswith(_REMEDY):
                fix = line.removeprefix(_REMEDY)
                break
            message.append(line)
        return "\n".join(message), fix
    return (lines[-1], "") if lines else ("", "")


def describe_exit(code: int | None) -> str:
    if code is None:
        return "still running"
    if code >= 0:
        return f"exit code {code}"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    hint = KILLED if -code == signal.SIGKILL else ""
    return f"exit code {code}, ended by {name}{hint}"
