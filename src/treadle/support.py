"""Table of what is supported: versions, model families, number formats, modes of weight sync.

Settings, plan, doctor, engine, export and their errors read it; tests/unit/docs/test_support.py compares the docs and
pyproject.toml with it. Versions of torch and transformers are those of the package's own requirements (pyproject.toml),
which doctor reads from its metadata.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Literal

PYTHON = (3, 11)  # the oldest


@dataclass(frozen=True)
class VersionRange:
    """The versions, by their first two numbers, that the tests were run with: `VersionRange((0, 26), (0, 32))`."""

    oldest: tuple[int, int]
    newest: tuple[int, int]

    def __contains__(self, version: str) -> bool:
        """Whether a version is one of these, or between them: `"0.28.1" in VLLM`."""
        numbers = re.match(r"(\d+)\.(\d+)", version)
        return numbers is not None and self.oldest <= (int(numbers[1]), int(numbers[2])) <= self.newest

    def __str__(self) -> str:
        """ "0.26 to 0.32"."""
        return "{}.{} to {}.{}".format(*self.oldest, *self.newest)


VLLM = VersionRange((0, 26), (0, 32))


@dataclass(frozen=True)
class ModelFamily:
    """A family of models that engine and trainer are tested with. Others are refused if their logits differ."""

    name: str
    gguf: str = ""  # its architecture in a GGUF file; empty: GGUF is not written for it


# By `model_type` of config.json. `treadle plan` counts the memory of these exactly.
FAMILIES = {
    "llama": ModelFamily("Llama", gguf="llama"),
    "mistral": ModelFamily("Mistral"),
    "qwen2": ModelFamily("Qwen2", gguf="qwen2"),
    "qwen3": ModelFamily("Qwen3", gguf="qwen3"),
}

WeightModeName = Literal["shared_vllm", "lora_only", "lora_restart", "none", "reload", "delta", "offline"]


@dataclass(frozen=True)
class WeightMode:
    """One value of weight_bridge_mode, and its limits."""

    adapters: bool = False  # publishes adapters, and trains them
    restarts: bool = False  # the engine is restarted with what was saved
    single_copy: bool = False  # one copy of the weights for engine and trainer is possible
    quantized_base: bool = False  # works with a frozen base model in 4 bits
    # The engine takes whole weights from memory: one copy that it shares, which an engine that is split over several
    # GPUs cannot (config/sync.py), or a broadcast.
    in_memory: bool = False
    uses_folder: bool = True  # weights or adapters pass through a folder that the engine reads
    publishes: bool = True  # new weights reach an engine
    fleet: bool = False  # several engines, which may die, return and join while the trainer trains
    every_step: bool = False  # each step is published: no interval
    interval: int = 1  # steps from one publish to the next, by default
    deadline_s: float = 180.0  # for one publish, by default


_ADAPTERS = {"adapters": True, "quantized_base": True}
WEIGHT_MODES: dict[str, WeightMode] = {
    "shared_vllm": WeightMode(single_copy=True, in_memory=True, uses_folder=False, every_step=True),
    "lora_only": WeightMode(**_ADAPTERS, single_copy=True, fleet=True),
    "lora_restart": WeightMode(**_ADAPTERS, restarts=True, interval=3, deadline_s=900.0),
    "none": WeightMode(restarts=True, interval=3, deadline_s=900.0),
    "reload": WeightMode(fleet=True),
    "delta": WeightMode(),
    "offline": WeightMode(quantized_base=True, uses_folder=False, publishes=False, every_step=True),
}
# Nats per token that trainer and engine may differ by on the canary on average; a single token may differ ten times as
# much (sync/verify.py).
CANARY_BOUNDS = {"float32": 1e-4, "float16": 0.03, "bfloat16": 0.25}
CANARY_BOUNDS_TEXT = ", ".join(f"{bound:g} in {dtype}" for dtype, bound in CANARY_BOUNDS.items())
# Modes that `treadle matrix` compares: settings of the trainer.
MATRIX_MODES: Mapping[str, Mapping[str, str | bool]] = MappingProxyType({
    "single_copy": {"single_copy": True},
    "broadcast": {"use_shared_memory": True},
    "broadcast_gloo": {"use_shared_memory": True, "broadcast_by": "gloo"},
    "broadcast_nccl": {"use_shared_memory": True, "broadcast_by": "nccl"},
    "lora_only": {"weight_bridge_mode": "lora_only"},
    "lora_single_copy": {"weight_bridge_mode": "lora_only", "single_copy": True},
    "lora_restart": {"weight_bridge_mode": "lora_restart"},
    "none": {"weight_bridge_mode": "none"},
    "reload": {"weight_bridge_mode": "reload"},
    "delta": {"weight_bridge_mode": "delta"},
})  # fmt: skip


# ---- number formats of this machine's processor

_CPUINFO = Path("/proc/cpuinfo")
_FLAG_LINES = ("flags", "Features")  # as Linux calls them on x86 and on ARM
# Processors that multiply bf16 numbers by themselves. On others torch takes detours, on some hundreds of times as long
# as for float32.
FAST_BF16 = frozenset({"amx_bf16", "avx512_bf16", "bf16"})


@functools.cache
def processor_flags() -> frozenset[str]:
    """Feature flags of /proc/cpuinfo; empty where there is no such file, as on a Mac."""
    try:
        lines = _CPUINFO.read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line.partition(":")[2] for line in lines if line.startswith(_FLAG_LINES)), "").split())


def fast_dtype(device: str) -> str:
    """The number format to serve and train in where nobody names one."""
    is_slow = device.partition(":")[0] == "cpu" and not FAST_BF16 & processor_flags()
    return "float32" if is_slow else "bfloat16"
