"""The examples in docstrings are run: they show real values."""

from __future__ import annotations

import doctest
import importlib

import pytest

MODULES = [
    "treadle.config.load", "treadle.engines.sampling", "treadle.envs.arithmetic", "treadle.sync.layout",
    "treadle.train.advantage", "treadle.train.loss", "treadle.train.optim",
]  # fmt: skip


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings(name):
    results = doctest.testmod(importlib.import_module(name))
    assert results.attempted > 0
    assert results.failed == 0
