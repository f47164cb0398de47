"""The inference process: one HTTP API (api/), and two engines behind it."""

from __future__ import annotations

import gc

from treadle.config import EngineConfig
from treadle.errors import require


def serve(config: EngineConfig) -> None:
    """Serve a model until SIGTERM."""
    require("train", "torch", "transformers")
    gc.disable()  # see train/__init__.py; the server freezes what is loaded when it is ready
    from treadle.engines.server import run_engine

    gc.enable()
    run_engine(config)
