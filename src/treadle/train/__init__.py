"""The trainer process."""

from __future__ import annotations

from treadle.config import TrainConfig
from treadle.errors import require


def main(config: TrainConfig) -> None:
    """Train until the last step, or until SIGTERM, which saves and ends in order."""
    require("train", "torch", "transformers")
    from treadle.train.process import run_trainer

    run_trainer(config)
