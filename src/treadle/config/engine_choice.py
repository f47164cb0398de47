"""Which engine a configuration means."""

from __future__ import annotations

import importlib.util

from treadle.config.schema import EngineConfig


def has_vllm(config: EngineConfig) -> bool:
    """Whether vLLM is to generate: as the user says, else where it is installed, in this Python or in the one named."""
    if config.engine == "auto":
        return bool(config.vllm_python) or importlib.util.find_spec("vllm") is not None
    return config.engine == "vllm"
