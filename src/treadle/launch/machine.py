"""Read facts about this machine for the plan, and reserve the ports of a run.

Ports are bound before anything else happens and the sockets are passed to the servers: a port that was only checked can
belong to another program a moment later, and the run would talk to that one.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from treadle.config.schema import may_use_gpu
from treadle.errors import PortInUse
from treadle.gpus import Gpu, find_gpus
from treadle.net.address import take_port
from treadle.support import fast_dtype

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - memory, not a temporary file
_SHARED_MEMORY_MIN_BYTES = 1e9
_CGROUP_QUOTA = Path("/sys/fs/cgroup/cpu.max")
_OUTGOING_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
_FIRST_OUTGOING_PORT = 32_768  # of most systems
_FIRST_FREE_PORT = 10_000
ANY_FREE = 0  # a port that the system chooses
Listeners = Mapping[str, socket.socket]


@dataclass(frozen=True)
class MachineFacts:
    """`ports`: reserved for the servers of the run, by name."""

    num_cores: int
    has_shared_memory: bool
    has_gpu: bool = False
    has_bf16: bool = True  # whether the processor has bf16 instructions
    ports: Mapping[str, int] = field(default_factory=dict)
    launcher_pid: int = 0
    python: str = sys.executable
    environment: Mapping[str, str] = field(default_factory=dict)
    gpus: tuple[Gpu, ...] = ()  # that nvidia-smi lists; empty if it is not installed
    num_machines: int = 1  # of the run


def read_machine_facts(ports: Mapping[str, int]) -> MachineFacts:
    return MachineFacts(
        num_cores=count_cores(),
        has_shared_memory=_has_shared_memory(),
        has_gpu=may_use_gpu("auto"),
        has_bf16=fast_dtype("cpu") == "bfloat16",
        ports=dict(ports),
        launcher_pid=os.getpid(),
        environment=dict(os.environ),
        gpus=find_gpus(os.environ) if may_use_gpu("auto") else (),
    )


def _has_shared_memory() -> bool:
    """False if it is very small, as in some containers: writing beyond its size kills the engine without a message."""
    if not (SHARED_MEMORY.is_dir() and os.access(SHARED_MEMORY, os.W_OK)):
        return False
    return shutil.disk_usage(SHARED_MEMORY).free >= _SHARED_MEMORY_MIN_BYTES


def count_cores() -> int:
    """Cores that this process may use: its affinity, limited by the quota of its container."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = _CGROUP_QUOTA.read_text().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))


def is_port_busy(host: str, port: int) -> bool:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        # As servers do: a connection in TIME_WAIT does not make a port busy.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return True
    return False


# ---- ports


@contextmanager
def held_ports(wanted: Mapping[str, tuple[str, int]], explicit: frozenset[str] = frozenset()) -> Iterator[Listeners]:
    """Listening sockets by name, for {"hub": ("127.0.0.1", 8000)}, until the block ends or a child process takes them.

    A busy default port is replaced by a free one; a busy port of the user ("hub.port" in `explicit`) is an error.
    """
    chosen = {name: address for name, address in wanted.items() if f"{name}.port" in explicit}
    _refuse_shared_port(chosen)
    in_order = {**chosen, **wanted}  # chosen ports first, so that no default takes one of them
    with ExitStack() as stack:
        taken = {
            name: stack.enter_context(_hold(name, host, port, is_chosen=name in chosen))
            for name, (host, port) in in_order.items()
        }
        yield {name: taken[name] for name in wanted}


def _refuse_shared_port(chosen: Mapping[str, tuple[str, int]]) -> None:
    """Hosts are not compared, because one host may have several names."""
    owners: dict[int, str] = {}
    for name, (_, port) in chosen.items():
        other = owners.setdefault(port, name)
        if other != name and port != ANY_FREE:
            raise PortInUse(
                f"--{other}.port and --{name}.port are both {port}: two servers cannot share a port",
                fix=f"choose another --{name}.port",
            )


def find_port(host: str) -> int:
    """A port that is free now, for a process that cannot take a socket. It is below the range from which the system
    takes the ports of outgoing connections: one of those could get it before the process listens."""
    try:
        lowest = int(_OUTGOING_PORTS.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        lowest = _FIRST_OUTGOING_PORT
    while True:
        port = random.randrange(_FIRST_FREE_PORT, max(lowest, _FIRST_FREE_PORT + 1000))  # noqa: S311
        if not is_port_busy(host, port):
            return port


def of_this_machine(addresses: Mapping[str, tuple[str, int]]) -> dict[str, tuple[str, int]]:
    """Those that a server can listen on here."""
    return {name: (host, port) for name, (host, port) in addresses.items() if not _is_elsewhere(host)}


def _is_elsewhere(host: str) -> bool:
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.bind((host, ANY_FREE))
    except OSError as error:
        return error.errno == errno.EADDRNOTAVAIL
    return False


def port_of(listener: socket.socket) -> int:
    return int(listener.getsockname()[1])


def _hold(name: str, host: str, port: int, *, is_chosen: bool) -> socket.socket:
    try:
        return take_port(host, port)
    except PortInUse:
        if is_chosen:
            message = f"port {port}, asked for by --{name}.port, is in use"
            raise PortInUse(message, fix=f"choose another --{name}.port") from None
        return take_port(host, ANY_FREE)
