"""The inference process: one HTTP surface, and the engines behind it."""

from __future__ import annotations

import importlib.util

from treadle.config import EngineConfig
from treadle.errors import MissingExtra


def serve(config: EngineConfig) -> None:
    """Serve a model until SIGTERM."""
    for package in ("torch", "transformers"):
        if importlib.util.find_spec(package) is None:
            raise MissingExtra(f"the engine needs {package}", fix="pip install 'treadle[train]'")
    from treadle.engines.server import run_engine

    run_engine(config)
