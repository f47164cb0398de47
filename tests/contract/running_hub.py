"""A hub as users run it: a process of its own, on a free port, that may be killed and started again."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx

READY_S = 20.0  # a loaded machine may be slow to import


class RunningHub:
    """`with RunningHub(folder, "--read-timeout-s", "1") as hub: httpx.get(hub.url)`"""

    def __init__(self, folder: Path, *flags: str, env: dict[str, str] | None = None) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.database = folder / "hub.sqlite"
        self.log_file = folder / "hub.log"
        self._flags = flags
        self._env = env or {}
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> RunningHub:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.process is not None and self.process.poll() is None:
            self.end(signal.SIGKILL)

    def start(self) -> None:
        command = [sys.executable, "-m", "treadle", "hub", "--port", str(self.port), "--database", str(self.database)]
        began = time.monotonic()
        with self.log_file.open("ab") as log:
            self.process = subprocess.Popen(
                [*command, *self._flags], stdout=log, stderr=log, env=os.environ | self._env
            )
        while time.monotonic() - began < READY_S:
            assert self.process.poll() is None, self.log()
            try:
                if httpx.get(f"{self.url}/healthz", timeout=2.0).status_code == 200:
                    return
            except httpx.TransportError:
                time.sleep(0.02)
        raise AssertionError(f"the hub is not ready after {READY_S} s:\n{self.log()}")

    def end(self, number: signal.Signals) -> tuple[int, float]:
        """Exit code, and the seconds it took."""
        assert self.process is not None
        began = time.monotonic()
        os.kill(self.process.pid, number)
        return self.process.wait(timeout=20), time.monotonic() - began

    def log(self) -> str:
        return self.log_file.read_text()[-4000:]
