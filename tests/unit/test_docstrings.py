"""The examples in docstrings are run: they show real values."""

from __future__ import annotations

import doctest
import importlib

import pytest

MODULES = [
    "treadle.config.load", "treadle.dash.charts", "treadle.dash.downsample", "treadle.dash.queue_history",
    "treadle.engines.sampling", "treadle.envs.tasks.arithmetic", "treadle.sync.layout",
    "treadle.launch.budget.accounting", "treadle.launch.budget.shapes", "treadle.track.health_log",
    "treadle.track.names",
    "treadle.train.advantage", "treadle.train.attention.sdpa", "treadle.train.gradients", "treadle.train.health",
    "treadle.train.loss", "treadle.train.loss_stats", "treadle.train.lora", "treadle.train.optim.adafactor",
    "treadle.train.optim.eight_bit", "treadle.train.optim.schedule", "treadle.train.partition",
    "treadle.train.trainable",
]  # fmt: skip


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings(name):
    results = doctest.testmod(importlib.import_module(name))
    assert results.attempted > 0
    assert results.failed == 0
