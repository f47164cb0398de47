"""Treadle: generate -> score -> train -> publish, turn after turn.

import treadle

run = treadle.train(model="smollm2-135m-instruct", data=rows, rewards=[my_reward], steps=25)
run.plot()
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from treadle.api import Run, load, train

__version__ = "0.1.0"
__all__ = ["Run", "__version__", "load", "train"]


def __getattr__(name: str) -> Any:
    """The Python API is imported when it is asked for: the processes of a run import this package too."""
    if name in ("Run", "load", "train"):
        import importlib

        return getattr(importlib.import_module("treadle.api"), name)
    raise AttributeError(f"module 'treadle' has no attribute '{name}'")
