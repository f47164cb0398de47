"""The examples in docstrings are run: they show real values."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

import treadle

SOURCE = Path(treadle.__file__).parent
MODULES = sorted(
    ".".join(file.relative_to(SOURCE.parent).with_suffix("").parts)
    for file in SOURCE.rglob("*.py")
    if ">>> " in file.read_text()
)


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings(name):
    results = doctest.testmod(importlib.import_module(name))
    assert results.failed == 0
