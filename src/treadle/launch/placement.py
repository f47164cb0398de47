"""Turn the processes of a plan into running processes: on this machine, or by a scheduler (slurm.py).

The supervisor decides what is started, watched, restarted and stopped. A placement only starts a process somewhere and
returns a handle to it, so a run behaves the same wherever its processes are.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

from treadle.launch.machine import Listeners
from treadle.launch.process_spec import ProcessSpec
from treadle.net.address import HANDED_FD


class ProcessHandle(Protocol):
    """A process that was started."""

    @property
    def pid(self) -> int | None:
        """On this machine; None for a process elsewhere."""

    @property
    def reported_pid(self) -> int | None:
        """By which it reports to the hub, on its own machine; None if it is not known."""

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while it runs. What it has started ends with it."""

    def terminate(self) -> None:
        """Send SIGTERM to it alone; it stops its own children."""

    def kill(self) -> None:
        """Kill it and what it has started, and wait for its end."""


class Placement(Protocol):
    def has_machine(self, spec: ProcessSpec) -> bool:
        """Whether `start` need not wait for a machine."""

    def start(self, spec: ProcessSpec) -> ProcessHandle:
        """Start a process whose output is appended to `spec.log_path`."""


class LocalProcess:
    """A child in a session of its own: Ctrl-C in the terminal reaches only the launcher, which stops them in order."""

    def __init__(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        log_path: Path,
        *,
        handed: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        """`handed`: descriptors that the child inherits, by the variables that name them to it."""
        with log_path.open("ab") as log:
            self._process = subprocess.Popen(
                argv,
                env={**env, **{name: str(number) for name, number in handed.items()}},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=tuple(handed.values()),
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def reported_pid(self) -> int:
        return self.pid

    def wait(self) -> int:
        """The exit code, when it has ended."""
        self._process.wait()
        return self.poll() or 0

    def poll(self) -> int | None:
        if self._process.returncode is None and self._process.poll() is not None:
            self._signal_group(signal.SIGKILL)
        return self._process.returncode

    def terminate(self) -> None:
        self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        if self.poll() is None:
            self._signal_group(signal.SIGKILL)
            self._process.wait()

    def _signal_group(self, number: signal.Signals) -> None:
        try:
            os.killpg(self.pid, number)
        except (ProcessLookupError, PermissionError):
            return  # the group is empty, or not of this user


class LocalPlacement:
    """Starts child processes on this machine. `listeners`: sockets of servers, by name; each is handed to its server
    when that starts first, and closed here, so that its port is free when the server ends."""

    def __init__(self, listeners: Listeners = MappingProxyType({})) -> None:
        self._listeners = dict(listeners)

    def release(self, name: str) -> None:
        """Close the socket of a server that another placement starts: it takes the port itself."""
        listener = self._listeners.pop(name, None)
        if listener is not None:
            listener.close()

    def has_machine(self, _: ProcessSpec) -> bool:
        return True

    def start(self, spec: ProcessSpec) -> LocalProcess:
        listener = self._listeners.pop(spec.name, None)
        if listener is None:
            return LocalProcess(spec.argv, spec.env, spec.log_path)
        with listener:
            return LocalProcess(spec.argv, spec.env, spec.log_path, handed={HANDED_FD: listener.fileno()})
