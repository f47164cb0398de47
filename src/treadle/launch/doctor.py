"""`treadle doctor`: what this machine has, what it lacks, and what to do about it."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import psutil  # type: ignore[import-untyped]
from rich.console import Console
from rich.table import Table

from treadle.config.schema import RunConfig
from treadle.launch.machine import SHARED_MEMORY, count_cores, is_port_busy
from treadle.launch.plan import wished_addresses
from treadle.launch.wording import gigabytes

Verdict = Literal["ok", "warning", "problem"]
_COLOURS = {"ok": "green", "warning": "yellow", "problem": "red"}
_CPUINFO = Path("/proc/cpuinfo")
_ONE_GB = 1e9
# torch is asked in a process of its own: the launcher never loads it.
_QUESTIONS = """
import json, sys
answers = {}
try:
    import torch
    answers["gpus"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
except Exception as error:
    answers["torch_error"] = f"{type(error).__name__}: {error}"
try:
    from treadle.engines.default_model import cache_folder, default_model_folder
    answers["cache"] = str(cache_folder())
    answers["is_model_cached"] = default_model_folder().is_dir()
except Exception as error:
    answers["cache_error"] = f"{type(error).__name__}: {error}"
print(json.dumps(answers))
"""


@dataclass(frozen=True)
class Check:
    name: str
    verdict: Verdict
    found: str
    remedy: str = ""


def examine(console: Console | None = None) -> int:
    checks = run_checks()
    (console or Console()).print(_as_table(checks))
    return 1 if any(check.verdict == "problem" for check in checks) else 0


def run_checks() -> list[Check]:
    answers = _ask_torch()
    config = RunConfig()
    return [
        check_python(sys.version_info[:3]),
        _check_package("torch", is_needed=True),
        _check_package("transformers", is_needed=True),
        _check_package("vllm", is_needed=False),
        _check_gpu(answers),
        check_cpu(count_cores(), _cpu_flags()),
        _check_memory(),
        _check_disk("disk for runs", config.output),
        _check_disk("disk for models", Path(answers.get("cache") or Path.home())),
        _check_shared_memory(),
        *check_ports(wished_addresses(config), is_port_busy),
        _check_default_model(answers),
    ]


def check_python(version: tuple[int, ...]) -> Check:
    words = ".".join(map(str, version))
    if version < (3, 11):
        return Check("Python", "problem", words, "install Python 3.11 or newer")
    return Check("Python", "ok", words)


def check_cpu(num_cores: int, flags: frozenset[str]) -> Check:
    """bf16 without matrix units works, but slowly; that is worth knowing before a long run."""
    name = f"{num_cores} core{'s' if num_cores != 1 else ''}, {platform.machine()}"
    if "amx_bf16" in flags:
        return Check("CPU", "ok", f"{name}, AMX (fast bf16)")
    if "avx512_bf16" in flags:
        return Check("CPU", "ok", f"{name}, AVX-512 with bf16")
    slow = "training in bf16 is slow here; --engine.dtype float32 may be faster"
    if "avx512f" in flags:
        return Check("CPU", "warning", f"{name}, AVX-512 without bf16", slow)
    return Check("CPU", "warning", f"{name}, neither AMX nor AVX-512", slow)


def check_ports(wished: dict[str, tuple[str, int]], is_busy: Callable[[str, int], bool]) -> list[Check]:
    def check(name: str, host: str, port: int) -> Check:
        if is_busy(host, port):
            remedy = f"treadle run takes another by itself; treadle {name} needs --port"
            return Check(f"port of the {name}", "warning", f"{port} is in use", remedy)
        return Check(f"port of the {name}", "ok", f"{port} is free")

    return [check(name, host, port) for name, (host, port) in wished.items()]


def _check_package(name: str, *, is_needed: bool) -> Check:
    try:
        return Check(name, "ok", importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        if is_needed:
            return Check(name, "problem", "not installed", "pip install 'treadle[train]'")
        return Check(name, "ok", "not installed (optional)")


def _ask_torch() -> dict[str, Any]:
    try:
        done = subprocess.run(
            [sys.executable, "-c", _QUESTIONS], capture_output=True, text=True, timeout=120, check=True
        )
        return dict(json.loads(done.stdout.strip().splitlines()[-1]))
    except (subprocess.SubprocessError, ValueError, IndexError) as error:
        return {"torch_error": type(error).__name__}


def _check_gpu(answers: dict[str, Any]) -> Check:
    if "torch_error" in answers:
        return Check("GPU", "problem", f"torch does not load: {answers['torch_error']}", "install torch again")
    gpus = answers.get("gpus") or []
    return Check("GPU", "ok", ", ".join(gpus) if gpus else "none: the CPU is used")


def _check_memory() -> Check:
    memory = psutil.virtual_memory()
    found = f"{gigabytes(memory.available)} of {gigabytes(memory.total)} free"
    if memory.available < 3 * _ONE_GB:
        return Check("memory", "problem", found, "end other programs; the default job takes up to 6 GB")
    if memory.available < 6 * _ONE_GB:
        return Check("memory", "warning", found, "the default job takes up to 6 GB; end other programs")
    return Check("memory", "ok", found)


def _check_disk(name: str, place: Path) -> Check:
    place = place.expanduser().resolve()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    found = f"{gigabytes(free)} free at {place}"
    if free < 2 * _ONE_GB:
        return Check(name, "problem", found, "free some space, or choose another disk with --output")
    if free < 5 * _ONE_GB:
        return Check(name, "warning", found, "the default job may need 5 GB")
    return Check(name, "ok", found)


def _check_shared_memory() -> Check:
    if not SHARED_MEMORY.is_dir():
        return Check("shared memory", "warning", "none", "the weights are shared through the run folder instead")
    free = shutil.disk_usage(SHARED_MEMORY).free
    if free < _ONE_GB:
        remedy = "enlarge it (docker: --shm-size 4g), or set --engine.weights-file to a file on a fast disk"
        return Check("shared memory", "warning", f"{gigabytes(free)} free in {SHARED_MEMORY}", remedy)
    return Check("shared memory", "ok", f"{gigabytes(free)} free in {SHARED_MEMORY}")


def _check_default_model(answers: dict[str, Any]) -> Check:
    if answers.get("is_model_cached"):
        return Check("default model", "ok", "in the cache")
    return Check("default model", "ok", "not fetched yet: the first run fetches 93 MB from the package index")


def _cpu_flags() -> frozenset[str]:
    try:
        lines = _CPUINFO.read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line.partition(":")[2] for line in lines if line.startswith("flags")), "").split())


def _as_table(checks: list[Check]) -> Table:
    table = Table(show_edge=False, pad_edge=False, box=None, padding=(0, 2, 0, 0))
    for column in ("check", "", "found", "what to do"):
        table.add_column(column, header_style="dim", overflow="fold")
    for check in checks:
        colour = _COLOURS[check.verdict]
        table.add_row(check.name, f"[{colour}]{check.verdict}[/{colour}]", check.found, check.remedy)
    return table
