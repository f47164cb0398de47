"""The inference process: one HTTP API (api/), and two engines behind it."""

from __future__ import annotations

from treadle.config import EngineConfig
from treadle.errors import require


def serve(config: EngineConfig) -> None:
    """Serve a model until SIGTERM."""
    require("train", "torch", "transformers")
    from treadle.engines.server import run_engine

    run_engine(config)
