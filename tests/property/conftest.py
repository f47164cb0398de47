"""Fixtures of the property tests. `TREADLE_PROPERTY_PROFILE=nightly` tries 2,000 examples each (tests/conftest.py)."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def scratch() -> Iterator[Path]:
    """A folder in memory where there is one: what is tried here is logic, and syncing a disk takes most of the time."""
    memory = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(prefix="treadle-", dir=memory if memory.is_dir() else None))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)
