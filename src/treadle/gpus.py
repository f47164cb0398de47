"""List the NVIDIA GPUs that this process may use, and restrict a process to some of them. No torch.

GPUs are counted as CUDA counts them in this process: from 0, within its own CUDA_VISIBLE_DEVICES.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass

from treadle.errors import ConfigError

VISIBLE = "CUDA_VISIBLE_DEVICES"
ORDER = "CUDA_DEVICE_ORDER"
_QUERY = ("--query-gpu=index,uuid,name,memory.total", "--format=csv,noheader,nounits")
_ANSWER_S = 20.0


@dataclass(frozen=True)
class Gpu:
    name: str
    num_bytes: int  # 0: not known, as of a MIG slice


def find_gpus(environment: Mapping[str, str]) -> tuple[Gpu, ...]:
    """The GPUs of this machine that a process with this environment sees, as nvidia-smi reports them; () without it."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ()
    try:
        done = subprocess.run([tool, *_QUERY], capture_output=True, text=True, timeout=_ANSWER_S, check=True)
        return visible_gpus(done.stdout, environment.get(VISIBLE))
    except (subprocess.SubprocessError, OSError, ValueError):
        return ()


def visible_gpus(table: str, visible: str | None) -> tuple[Gpu, ...]:
    """Those of nvidia-smi's table that CUDA_VISIBLE_DEVICES names by number or UUID, in its order. Pure.

    >>> table = "0, GPU-a1, NVIDIA L4, 23034\\n1, GPU-b2, NVIDIA H100, 81559\\n"
    >>> [gpu.name for gpu in visible_gpus(table, None)], [gpu.name for gpu in visible_gpus(table, "1")]
    (['NVIDIA L4', 'NVIDIA H100'], ['NVIDIA H100'])
    """
    rows = [[part.strip() for part in line.split(",")] for line in table.splitlines() if line.strip()]
    names = [row[0] for row in rows] if visible is None else device_names(visible)
    found = []
    for name in names:
        row = next((row for row in rows if row[0] == name or (not name.isdigit() and row[1].startswith(name))), None)
        if row is None and name.isdigit():
            break  # CUDA ignores a number that does not exist, and everything after it
        found.append(Gpu("", 0) if row is None else Gpu(row[2], int(row[3]) * 2**20))
    return tuple(found)


def device_names(visible: str) -> list[str]:
    """The entries of a CUDA_VISIBLE_DEVICES; CUDA ignores everything after a negative number.

    >>> device_names("2,GPU-a1,-1,0")
    ['2', 'GPU-a1']
    """
    names: list[str] = []
    for name in visible.split(","):
        if name.strip().startswith("-"):
            break
        names += [name.strip()] if name.strip() else []
    return names


def visible_devices(gpus: Sequence[int], inherited: str | None, flag: str = "--gpus") -> str:
    """The CUDA_VISIBLE_DEVICES of a process that uses these GPUs; `inherited`: the present one.

    >>> visible_devices((0, 1), None), visible_devices((1,), "4,GPU-a1")
    ('0,1', 'GPU-a1')
    """
    if inherited is None:
        return ",".join(map(str, gpus))
    names = device_names(inherited)
    missing = [gpu for gpu in gpus if gpu >= len(names)]
    if missing:
        raise ConfigError(
            f"{flag} names GPU {missing[0]}, and {VISIBLE} is '{inherited}': it lists {len(names)}, counted from 0",
            fix=f"correct {flag} or {VISIBLE}",
        )
    return ",".join(names[gpu] for gpu in gpus)


def use_gpus(gpus: Sequence[int] | None, environment: MutableMapping[str, str] = os.environ) -> None:
    """Restrict this process, and those that it starts, to these GPUs; None: all. Call it before CUDA is initialised."""
    if gpus is None:
        return
    if VISIBLE not in environment:
        environment.setdefault(ORDER, "PCI_BUS_ID")  # the order of nvidia-smi; CUDA's own puts the fastest GPU first
    environment[VISIBLE] = visible_devices(gpus, environment.get(VISIBLE))
