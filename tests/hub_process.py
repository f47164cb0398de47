"""A hub as users run it: a process of its own, on a free port, over one database; may be killed and started again."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx

from tests.e2e.processes import end_of, environment, free_port

READY_S = 120.0  # a loaded machine is slow to import; the promise of 2 s is asserted where it is made


class HubProcess:
    """`with HubProcess(folder, "--read-timeout-s", "1") as hub: httpx.get(hub.url)`"""

    def __init__(
        self,
        folder: Path,
        *flags: str,
        database: Path | None = None,
        env: dict[str, str] | None = None,
        max_files: int | None = None,
    ) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.database = database or folder / "hub.sqlite"
        self.log_file = folder / "hub.log"
        self._flags = flags
        self._env = env or {}
        self._max_files = max_files
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> HubProcess:
        if self.process is None:
            self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    @property
    def log(self) -> str:
        return self.log_file.read_text()

    def launch(self, fault: str = "") -> subprocess.Popen[bytes]:
        """Start it and do not wait. `fault`: where it is to die, see treadle.faults."""
        command = [sys.executable, "-m", "treadle", "hub", "--port", str(self.port), "--database", str(self.database)]
        with self.log_file.open("ab") as log:
            self.process = subprocess.Popen(
                [*command, *self._flags],
                stdout=log,
                stderr=log,
                env=environment(TREADLE_FAULT=fault, **self._env),
                preexec_fn=self._limit_files if self._max_files else None,  # noqa: PLW1509
            )
        return self.process

    def start(self, fault: str = "") -> float:
        """Seconds from the start of the process until it answers."""
        began = time.monotonic()
        process = self.launch(fault)
        while time.monotonic() - began < READY_S:
            assert process.poll() is None, end_of(self.log_file)
            try:
                if httpx.get(f"{self.url}/healthz", timeout=2.0).status_code == 200:
                    return time.monotonic() - began
            except httpx.TransportError:
                time.sleep(0.01)
        raise AssertionError(f"the hub is not ready after {READY_S} s:\n{end_of(self.log_file)}")

    @property
    def cpu_s(self) -> float:
        """Processor time that the process has used since its start."""
        assert self.process is not None
        user, system = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")

    def send(self, number: signal.Signals) -> None:
        assert self.process is not None
        os.kill(self.process.pid, number)

    def wait(self, timeout_s: float = 60.0) -> int:
        assert self.process is not None
        return self.process.wait(timeout_s)

    def stop(self) -> tuple[int, float]:
        """Exit code after SIGTERM, and the seconds it took."""
        began = time.monotonic()
        self.send(signal.SIGTERM)
        return self.wait(), time.monotonic() - began

    def end(self) -> None:
        """kill -9, if it still runs."""
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def client(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=60.0)

    def _limit_files(self) -> None:
        assert self._max_files is not None
        resource.setrlimit(resource.RLIMIT_NOFILE, (self._max_files, self._max_files))
