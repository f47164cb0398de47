"""How hard the properties are tried: `TREADLE_PROPERTY_PROFILE=nightly` tries them 2,000 times, 50 steps each."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

RELAXED = {"deadline": None, "suppress_health_check": list(HealthCheck), "database": None}
settings.register_profile("ci", max_examples=200, stateful_step_count=50, derandomize=True, **RELAXED)
settings.register_profile("nightly", max_examples=2000, stateful_step_count=50, print_blob=True, **RELAXED)
settings.load_profile(os.environ.get("TREADLE_PROPERTY_PROFILE", "ci"))


@pytest.fixture(scope="module")
def scratch() -> Iterator[Path]:
    """A folder in memory where there is one: what is tried here is logic, and syncing a disk takes most of the time."""
    memory = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(prefix="treadle-", dir=memory if memory.is_dir() else None))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)
