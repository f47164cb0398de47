"""How much memory there is: GPUs by name, and this machine."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from treadle.config.load import suggest
from treadle.errors import ConfigError

_GIB = 2**30
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
# What a program can have, as the driver reports it; the name on the box is rounded.
_USABLE_GIB = {
    "t4": 14.6,
    "v100-32gb": 31.7,
    "rtx3090": 23.6,
    "rtx4090": 23.5,
    "rtx5090": 31.3,
    "l4": 22.0,
    "a10g": 22.0,
    "a6000": 47.4,
    "l40s": 44.4,
    "a100-40gb": 39.4,
    "a100-80gb": 79.2,
    "h100": 79.1,
    "h100-nvl": 93.0,
    "gh200": 94.5,
    "h200": 139.8,
    "b200": 178.3,
    "mi300x": 191.9,
    "mi325x": 255.9,
}
_NO_PART_OF_A_NAME = frozenset(
    (
        "nvidia",
        "geforce",
        "tesla",
        "amd",
        "instinct",
        "pcie",
        "sxm",
        "sxm2",
        "sxm4",
        "sxm5",
        "hbm2",
        "hbm2e",
        "hbm3",
        "hbm3e",
    )
)
_ROUNDING = 0.1  # of a size in a name: an "L4 24GB" has 22.0 GiB
CARDS: dict[str, int] = {name: round(gib * _GIB) for name, gib in _USABLE_GIB.items()}


@dataclass(frozen=True)
class Machine:
    """`gpu_bytes`: of one GPU, None for a machine that trains on its CPU; `host_bytes` None: not known."""

    name: str
    gpu_bytes: int | None
    host_bytes: int | None

    @property
    def has_gpu(self) -> bool:
        return self.gpu_bytes is not None


def card_bytes(name: str) -> int:
    """The memory of a GPU by its name, as people and the driver write it.

    >>> card_bytes("H100") == card_bytes("NVIDIA H100 80GB HBM3") == card_bytes("h100-80gb")
    True
    """
    words = [word for word in re.split(r"[\s_-]+", name.lower()) if word and word not in _NO_PART_OF_A_NAME]
    size = next((word for word in words if re.fullmatch(r"\d+gi?b", word)), "")
    plain = "".join(word for word in words if word != size)
    gib = 0 if plain == "gh200" else int(re.sub(r"\D", "", size) or 0)  # its name has the size of the host's memory
    for card, known in CARDS.items():
        squeezed = card.replace("-", "")
        if squeezed == f"{plain}{gib}gb":
            return known
        fits = not gib or abs(known / _GIB - gib) < _ROUNDING * gib
        if fits and squeezed in (plain, f"rtx{plain}", plain.removeprefix("rtx")):
            return known
    variants = [card for card in CARDS if card.partition("-")[0] == plain]
    hint = f"known are {', '.join(variants)}" if variants else suggest(plain, CARDS) or "known: " + ", ".join(CARDS)
    raise ConfigError(f"the GPU '{name}' is not known", fix=f"{hint}; or give --gpu-memory-gb {gib or 'GB'}")


def find_gpu() -> tuple[str, int] | None:
    """(name, bytes) of this machine's first NVIDIA GPU. The driver's tool is asked: the launcher never loads torch."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    question = [tool, "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(question, capture_output=True, text=True, timeout=20, check=True).stdout
        name, megabytes = answer.strip().splitlines()[0].rsplit(",", 1)
        return name.strip(), int(megabytes) * 2**20
    except (subprocess.SubprocessError, OSError, ValueError, IndexError):
        return None


def host_memory() -> int:
    """The memory this process may use: the machine's, or its container's where that is less."""
    total = int(psutil.virtual_memory().total)
    try:
        return min(total, int(_CGROUP_LIMIT.read_text()))
    except (OSError, ValueError):  # no such file, or "max"
        return total
