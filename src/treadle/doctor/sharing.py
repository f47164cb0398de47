"""Test whether two processes can share weights as engine and trainer do: one writes, the other must see it.

The launcher never loads torch; these processes do, and the first one also reports what torch found.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from treadle.doctor.host import expandable_segments
from treadle.doctor.software import TorchFacts
from treadle.formatting import Finding
from treadle.launch.supervisor import describe_exit

DEADLINE_S = 60.0
PROGRAM = "treadle.sharing_check"
IN_MEMORY, ON_GPU = "cpu", "cuda"


@dataclass(frozen=True)
class SharingResult:
    """The result on one device; `error` is empty if the weights were shared."""

    device: str
    error: str = ""
    fix: str = ""


@dataclass(frozen=True)
class SharingTest:
    torch: TorchFacts
    results: tuple[SharingResult, ...]
    driver_cuda: str = ""

    def on(self, device: str) -> SharingResult | None:
        return next((result for result in self.results if result.device == device), None)


@dataclass(frozen=True)
class HostFacts:
    """Circumstances in which CUDA IPC is known to fail."""

    env: Mapping[str, str]
    is_wsl: bool = False
    is_container: bool = False


def try_sharing(folder: Path, deadline_s: float = DEADLINE_S) -> SharingTest:
    """In host memory, with a temporary file in `folder`, and on a GPU if there is one."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=folder, prefix="treadle-doctor-")))
        owner = stack.enter_context(_started("own", str(folder / "trial.weights")))
        opener = stack.enter_context(_started("open"))
        stack.enter_context(_ended_after(deadline_s, owner, opener))
        found = owner.receive()
        if found is None:
            return SharingTest(TorchFacts(error=owner.last_words()), ())
        torch = TorchFacts(built_for_cuda=found["built_for_cuda"], gpus=tuple(found["gpus"]), trouble=found["trouble"])
        return SharingTest(torch, tuple(_forward(owner, opener)), found["driver_cuda"])


def _forward(owner: _TestProcess, opener: _TestProcess) -> Iterator[SharingResult]:
    """Pass messages between the two, until the owner has tried every device or one of them has ended."""
    device = IN_MEMORY
    while (message := owner.receive()) is not None:
        device = message["device"]
        if "layout" not in message:
            yield SharingResult(device, message["error"], message["fix"])
            device = ON_GPU  # the next one, if there is a GPU
            continue
        opener.send(message)
        answer = opener.receive()
        if answer is None:
            yield SharingResult(device, opener.last_words())
            return
        owner.send(answer)
    if owner.exit_code() != 0:  # perhaps because of the shared memory itself
        yield SharingResult(device, owner.last_words())


class _TestProcess:
    """One of the two processes; messages are lines of JSON."""

    def __init__(self, process: subprocess.Popen[str], stderr: IO[str]) -> None:
        self._process = process
        self._stderr = stderr
        self._ended_because = ""

    def send(self, message: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None  # noqa: S101 - made with pipes
        with contextlib.suppress(BrokenPipeError):  # it has ended: `receive` returns None
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()

    def receive(self) -> dict[str, Any] | None:
        """None: it has ended."""
        assert self._process.stdout is not None  # noqa: S101
        line = self._process.stdout.readline()
        return dict(json.loads(line)) if line.startswith("{") else None

    def end(self, because: str) -> None:
        self._ended_because = because
        self._process.kill()

    def exit_code(self) -> int:
        return self._process.wait()

    def last_words(self) -> str:
        """Why it ended without an answer."""
        code = self.exit_code()
        if self._ended_because:
            return self._ended_because
        self._stderr.seek(0)
        lines = [line.strip() for line in self._stderr if line.strip()]
        return f"a process ended ({describe_exit(code)})" + (f": {lines[-1][:300]}" if lines else "")


@contextmanager
def _ended_after(deadline_s: float, *processes: _TestProcess) -> Iterator[None]:
    """End both at the deadline: a process that hangs in a driver would never answer."""

    def end_all() -> None:
        for process in processes:
            process.end(f"no answer within {deadline_s:.0f} s")

    alarm = threading.Timer(deadline_s, end_all)
    alarm.daemon = True
    alarm.start()
    try:
        yield
    finally:
        alarm.cancel()


@contextmanager
def _started(*words: str) -> Iterator[_TestProcess]:
    with tempfile.TemporaryFile("w+") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", PROGRAM, *words],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True,
        )  # fmt: skip
        try:
            yield _TestProcess(process, stderr)
        finally:
            process.kill()
            process.communicate()


def check_memory_sharing(test: SharingTest, folder: str) -> Finding:
    name = "weights in shared memory"
    result = test.on(IN_MEMORY)
    if result is None:
        return Finding(name, "warning", "not tried", "pip install 'treadle[train]'")
    if result.error:
        remedy = (
            result.fix or "docker run --shm-size 4g --ipc=host, or name a file on another disk: --engine.weights-file"
        )
        return Finding(name, "problem", f"two processes could not share a file in {folder}: {result.error}", remedy)
    return Finding(name, "ok", f"two processes shared a file in {folder}: one wrote, the other saw it")


def check_cuda_sharing(test: SharingTest, host: HostFacts) -> Finding:
    name = "weights on a GPU (CUDA IPC)"
    if not test.torch.gpus:
        return Finding(name, "ok", "skipped: torch sees no GPU")
    result = test.on(ON_GPU)
    if result is None:
        return Finding(name, "problem", "not tried: see the line above", "run treadle doctor again when that is fixed")
    if not result.error:
        return Finding(name, "ok", "two processes shared memory of a GPU: one wrote, the other saw it")
    cause, remedy = _cause(result, host)
    other_way = "or hand weights over through main memory: --train.use-shared-memory"
    return Finding(name, "problem", f"{result.error}; likely: {cause}", f"{remedy}; {other_way}")


def _cause(result: SharingResult, host: HostFacts) -> tuple[str, str]:
    variable = expandable_segments(host.env)
    if variable:
        return f"expandable_segments, asked for by {variable}", f"unset {variable}"
    if host.is_wsl:
        return "WSL2, which has no CUDA IPC", "run on Linux itself"
    if host.is_container:
        return (
            "the container forbids it, or engine and trainer are in two (separate PID namespaces)",
            "start both in one container, with docker run --ipc=host --cap-add SYS_PTRACE",
        )
    return (
        "engine and trainer in separate PID namespaces, or a driver without CUDA IPC",
        result.fix or "see docs/weights.md",
    )
