"""The trainer process."""

from __future__ import annotations

import importlib.util

from treadle.config import TrainConfig
from treadle.errors import MissingExtra


def main(config: TrainConfig) -> None:
    """Train until the last step, or until SIGTERM, which saves and ends in order."""
    for package in ("torch", "transformers"):
        if importlib.util.find_spec(package) is None:
            raise MissingExtra(f"the trainer needs {package}", fix="pip install 'treadle[train]'")
    from treadle.train.process import run_trainer

    run_trainer(config)
