"""Start Treadle's processes in a test, end them whatever happens, and show the end of the log that matters."""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx

SHOWN_LINES = 15  # of a log, when a test fails
QUIET_THREADS = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def environment(**more: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    return kept | QUIET_THREADS | more


def free_port() -> int:
    """Below the range that the kernel takes ports of outgoing connections from: one of those could get it first."""
    while True:
        port = random.randrange(10_000, 32_000)
        with socket.socket() as s, suppress(OSError):
            s.bind(("127.0.0.1", port))
            return port


@contextmanager
def running(verb: str, *flags: str, log: Path, inside: Sequence[str] = ()) -> Iterator[subprocess.Popen]:
    """`inside`: a command that becomes the one that is appended to it."""
    with log.open("ab") as output:
        process = subprocess.Popen(
            [*inside, sys.executable, "-m", "treadle", verb, *flags], stdout=output, stderr=output, env=environment()
        )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def without_folder(folder: Path) -> list[str] | None:
    """Words before a command that let it see an empty folder there, as on a machine without a shared disk; None where
    this user may not (it needs mount namespaces)."""
    words = ["unshare", "--map-root-user", "--mount", "sh", "-c", 'mount -t tmpfs none "$0" && exec "$@"', str(folder)]
    try:
        return words if subprocess.run([*words, "true"], capture_output=True, check=False).returncode == 0 else None
    except FileNotFoundError:
        return None


def wait_until_healthy(url: str, process: subprocess.Popen, log: Path, timeout_s: float = 90) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        assert process.poll() is None, f"it ended with exit code {process.poll()}:\n{end_of(log)}"
        try:
            if httpx.get(url).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    raise AssertionError(f"{url} is not healthy after {timeout_s} s:\n{end_of(log)}")


def end_of(log: Path, *others: Path) -> str:
    """The last lines of one log, and where all of it is. Of several: of the first in which an error stands."""
    logs = [each for each in (log, *others) if each.is_file()]
    shown = next((each for each in logs if _has_error(each)), log)
    text = shown.read_text(errors="replace") if shown.is_file() else ""
    rest = [str(each) for each in logs if each != shown]
    return "\n".join([f"--- {shown}", last_lines(text), *(["--- other logs:", *rest] if rest else [])])


def last_lines(text: str) -> str:
    return "\n".join(text.splitlines()[-SHOWN_LINES:])


def _has_error(log: Path) -> bool:
    text = log.read_text(errors="replace")
    return "Traceback (most recent call last)" in text or " ERROR " in text
