"""One child process: started in a session of its own, watched, stopped; its log keeps what it said."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
from pathlib import Path

from treadle.errors import ProcessDied, TreadleError, UserError
from treadle.launch.plan import ProcessSpec
from treadle.net.listening import HANDED_FD
from treadle.net.probe import answers_ok

NUM_TAIL_LINES = 20
KILLED = ", perhaps out of memory"  # what is said of a process that the system has killed
_USER_ERROR_CODE = 2
_READY_ANSWER_S = 0.5  # the port is open from the start; the launcher must not stand still while nobody answers
_OUR_WORDS = re.compile(r"^treadle[\w -]*: (?P<message>.+)$")
_REMEDY = "  -> "
# What the watchdog wrote to the log is no last word: a dump of stacks, as faulthandler and watch/stacks.py write it.
_OF_STACKS = re.compile(r'(  File ".*", line \d+ in |(Current thread|Thread) 0x[0-9a-f]+ |\d+ tasks? at )')


class ChildProcess:
    """A started process, in a session of its own: Ctrl-C in the terminal reaches only the launcher, which
    then stops every child in order."""

    def __init__(self, spec: ProcessSpec, listener: socket.socket | None = None) -> None:
        """`listener` is handed over: from then on only the child has it, and its port is free when the child ends."""
        self.spec = spec
        handed = {} if listener is None else {HANDED_FD: listener.fileno()}
        spec.log_path.parent.mkdir(parents=True, exist_ok=True)
        self._log_start = spec.log_path.stat().st_size if spec.log_path.exists() else 0
        with spec.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                spec.argv,
                env={**spec.env, **{name: str(number) for name, number in handed.items()}},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=tuple(handed.values()),
            )
        if listener is not None:
            listener.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> int | None:
        """The exit code, or None while it runs. What it may have left behind in its group ends with it."""
        if self._process.returncode is None and self._process.poll() is not None:
            self._signal_group(signal.SIGKILL)
        return self._process.returncode

    def terminate(self) -> None:
        """Ask it to end; its own children are its own to stop."""
        if self.poll() is None:
            self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it and everything in its group, now."""
        if self.poll() is None:
            self._signal_group(signal.SIGKILL)
            self._process.wait()

    def is_ready(self) -> bool:
        return self.spec.ready_url is None or answers_ok(self.spec.ready_url, timeout_s=_READY_ANSWER_S)

    def death(self, why: str = "") -> TreadleError:
        """Why it ended, in words: its own message for a mistake of the user's, else the tail of its log."""
        code = self.poll()
        tail = self.tail()
        if code == _USER_ERROR_CODE and not why:
            message, fix = last_words(tail)
            return UserError(message or f"{self.spec.name} refused its settings", fix=fix)
        said = "\n".join(f"  | {line}" for line in tail) or "  | (nothing)"
        return ProcessDied(
            f"{self.spec.name} {why or 'died'} ({describe_exit(code)}); the end of its log:\n{said}",
            fix=f"the whole log is {self.spec.log_path}",
        )

    def tail(self) -> list[str]:
        """The last lines that this life of the process wrote; those of an earlier one do not count."""
        return tail_of(self.spec.log_path, start=self._log_start)

    def _signal_group(self, number: signal.Signals) -> None:
        try:
            os.killpg(self.pid, number)
        except (ProcessLookupError, PermissionError):
            return  # nobody of ours is left in it


def tail_of(path: Path, *, start: int = 0, num_lines: int = NUM_TAIL_LINES) -> list[str]:
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(start, size - 64 * 1024))
            text = file.read().decode("utf-8", errors="replace")
    except OSError:
        return []
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    return [line for line in lines if not _OF_STACKS.match(line)][-num_lines:]


def last_words(lines: list[str]) -> tuple[str, str]:
    """(message, remedy) of the last complaint in a log.

    >>> last_words(["loading", "treadle: no model 'smol'", "  -> check --model"])
    ("no model 'smol'", 'check --model')
    """
    for number in range(len(lines) - 1, -1, -1):
        found = _OUR_WORDS.match(lines[number])
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
