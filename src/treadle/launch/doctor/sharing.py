"""Two real processes that share weights as engine and trainer do: the one writes, the other must see it.

The launcher never loads torch; they do, and the first of them tells what torch sees.
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

from treadle.launch.doctor.finding import Check
from treadle.launch.doctor.settings import expandable_segments
from treadle.launch.doctor.software import TorchFacts
from treadle.launch.process import describe_exit

DEADLINE_S = 60.0
PROGRAM = "treadle.sharing_check"
IN_MEMORY, ON_GPU = "cpu", "cuda"


@dataclass(frozen=True)
class Trial:
    """What became of it on one device; `error` is empty where the weights are shared."""

    device: str
    error: str = ""
    fix: str = ""


@dataclass(frozen=True)
class Trials:
    torch: TorchFacts
    made: tuple[Trial, ...]
    driver_cuda: str = ""

    def on(self, device: str) -> Trial | None:
        return next((trial for trial in self.made if trial.device == device), None)


@dataclass(frozen=True)
class Surroundings:
    """What CUDA IPC is known to fail in."""

    env: Mapping[str, str]
    is_wsl: bool = False
    is_container: bool = False


def try_sharing(folder: Path, deadline_s: float = DEADLINE_S) -> Trials:
    """In `folder` lies the file of the weights for a moment. In main memory always; on a GPU where there is one."""
    with ExitStack() as stack:
        own_file = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=folder, prefix="treadle-doctor-")))
        owner = stack.enter_context(_started("own", str(own_file / "trial.weights")))
        opener = stack.enter_context(_started("open"))
        stack.enter_context(_ended_after(deadline_s, owner, opener))
        sight = owner.hear()
        if sight is None:
            return Trials(TorchFacts(error=owner.last_words()), ())
        torch = TorchFacts(built_for_cuda=sight["built_for_cuda"], gpus=tuple(sight["gpus"]), trouble=sight["trouble"])
        return Trials(torch, tuple(_carry(owner, opener)), sight["driver_cuda"])


def _carry(owner: _Partner, opener: _Partner) -> Iterator[Trial]:
    """From the one to the other and back, until the owner has no more to offer or one of them is gone."""
    device = IN_MEMORY
    while (told := owner.hear()) is not None:
        device = told["device"]
        if "layout" not in told:
            yield Trial(device, told["error"], told["fix"])
            device = ON_GPU  # the next, if there is one
            continue
        opener.tell(told)
        answer = opener.hear()
        if answer is None:
            yield Trial(device, opener.last_words())
            return
        owner.tell(answer)
    if owner.exit_code() != 0:  # it died, perhaps of the very memory that it was to share
        yield Trial(device, owner.last_words())


class _Partner:
    """One of the two, and its lines of JSON."""

    def __init__(self, process: subprocess.Popen[str], said: IO[str]) -> None:
        self._process = process
        self._said = said
        self._ended_because = ""

    def tell(self, message: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None  # noqa: S101 - made with pipes
        with contextlib.suppress(BrokenPipeError):  # it is gone: its silence will tell
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()

    def hear(self) -> dict[str, Any] | None:
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
        self._said.seek(0)
        lines = [line.strip() for line in self._said if line.strip()]
        return f"a process ended ({describe_exit(code)})" + (f": {lines[-1][:300]}" if lines else "")


@contextmanager
def _ended_after(deadline_s: float, *partners: _Partner) -> Iterator[None]:
    """A process that hangs in a driver would never answer: its end is what whoever listens to it hears."""

    def end_all() -> None:
        for partner in partners:
            partner.end(f"no answer within {deadline_s:.0f} s")

    alarm = threading.Timer(deadline_s, end_all)
    alarm.daemon = True
    alarm.start()
    try:
        yield
    finally:
        alarm.cancel()


@contextmanager
def _started(*words: str) -> Iterator[_Partner]:
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(
            [sys.executable, "-m", PROGRAM, *words],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=said, text=True,
        )  # fmt: skip
        try:
            yield _Partner(process, said)
        finally:
            process.kill()
            process.communicate()


def check_memory_sharing(trials: Trials, folder: str) -> Check:
    name = "weights in shared memory"
    trial = trials.on(IN_MEMORY)
    if trial is None:
        return Check(name, "warning", "not tried", "pip install 'treadle[train]'")
    if trial.error:
        remedy = (
            trial.fix or "docker run --shm-size 4g --ipc=host, or name a file on another disk: --engine.weights-file"
        )
        return Check(name, "problem", f"two processes could not share a file in {folder}: {trial.error}", remedy)
    return Check(name, "ok", f"two processes shared a file in {folder}: one wrote, the other saw it")


def check_cuda_sharing(trials: Trials, around: Surroundings) -> Check:
    name = "weights on a GPU (CUDA IPC)"
    if not trials.torch.gpus:
        return Check(name, "ok", "skipped: torch sees no GPU")
    trial = trials.on(ON_GPU)
    if trial is None:
        return Check(name, "problem", "not tried: see the line above", "run treadle doctor again when that is mended")
    if not trial.error:
        return Check(name, "ok", "two processes shared memory of a GPU: one wrote, the other saw it")
    cause, remedy = _cause(trial, around)
    other_way = "or hand weights over through main memory: --train.use-shared-memory"
    return Check(name, "problem", f"{trial.error}; likely: {cause}", f"{remedy}; {other_way}")


def _cause(trial: Trial, around: Surroundings) -> tuple[str, str]:
    variable = expandable_segments(around.env)
    if variable:
        return f"expandable_segments, asked for by {variable}", f"unset {variable}"
    if around.is_wsl:
        return "WSL2, which has no CUDA IPC", "run on Linux itself"
    if around.is_container:
        return (
            "the container forbids it, or engine and trainer are in two (separate PID namespaces)",
            "start both in one container, with docker run --ipc=host --cap-add SYS_PTRACE",
        )
    return (
        "engine and trainer in separate PID namespaces, or a driver without CUDA IPC",
        trial.fix or "see docs/weights.md",
    )
