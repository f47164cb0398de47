"""What the plan must know about this machine, gathered in one place so that the plan itself stays pure."""

from __future__ import annotations

import os
import shutil
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from treadle.config.engine_choice import may_use_gpu
from treadle.processor import fast_dtype

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  (we want memory, not a temporary file)
_SHARED_MEMORY_MIN_BYTES = 1e9
_CGROUP_QUOTA = Path("/sys/fs/cgroup/cpu.max")


@dataclass(frozen=True)
class MachineFacts:
    """`ports`: those that are held for the servers of the run, by name."""

    num_cores: int
    has_shared_memory: bool
    has_gpu: bool = False
    has_bf16: bool = True  # whether the processor multiplies bf16 numbers by itself
    ports: Mapping[str, int] = field(default_factory=dict)
    launcher_pid: int = 0
    python: str = sys.executable
    environment: Mapping[str, str] = field(default_factory=dict)


def look_at_machine(ports: Mapping[str, int]) -> MachineFacts:
    return MachineFacts(
        num_cores=count_cores(),
        has_shared_memory=_has_shared_memory(),
        has_gpu=may_use_gpu("auto"),
        has_bf16=fast_dtype("cpu") == "bfloat16",
        ports=dict(ports),
        launcher_pid=os.getpid(),
        environment=dict(os.environ),
    )


def _has_shared_memory() -> bool:
    """Some containers have a tiny one: writing beyond its size would end the engine without a word."""
    if not (SHARED_MEMORY.is_dir() and os.access(SHARED_MEMORY, os.W_OK)):
        return False
    return shutil.disk_usage(SHARED_MEMORY).free >= _SHARED_MEMORY_MIN_BYTES


def count_cores() -> int:
    """The cores this process may use: its affinity, and the quota of its container where there is one."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = _CGROUP_QUOTA.read_text().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))


def is_port_busy(host: str, port: int) -> bool:
    with socket.socket(_family(host)) as probe:
        # As servers do: a connection that is merely closing down does not make a port busy.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return True
    return False


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
