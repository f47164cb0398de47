"""Settings of all tests: the marker `full`, hypothesis profiles, cheap HTTP clients."""

from __future__ import annotations

import functools
import gc
import logging
import os
import ssl
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from tests.postgres_server import PostgresServer

# Outside of a client, each httpx.get() reads all certificates again: 57 ms of CPU, for plain HTTP as well. The tests
# poll servers that are starting, and must not take the CPU from them.
ssl.create_default_context = functools.cache(ssl.create_default_context)

# Must be set before torch is imported. A thread that was given up at its deadline writes warnings during later tests;
# the error that its caller got says the same.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

# Examples have no deadline: on a busy machine any of them may take a second.
RELAXED = {"deadline": None, "suppress_health_check": list(HealthCheck), "database": None}
settings.register_profile("ci", max_examples=60, stateful_step_count=50, derandomize=True, **RELAXED)
settings.register_profile("full", max_examples=200, stateful_step_count=50, derandomize=True, **RELAXED)
settings.register_profile("nightly", max_examples=2000, stateful_step_count=50, print_blob=True, **RELAXED)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="also run the tests marked `full`, which guard rare paths")


def pytest_configure(config: pytest.Config) -> None:
    profile = "full" if config.getoption("--full") else "ci"
    settings.load_profile(os.environ.get("TREADLE_PROPERTY_PROFILE", profile))


@pytest.hookimpl(trylast=True)  # after markers were added
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests marked `full`, unless --full is given, -m names the marker, or a test is named by its id."""
    if config.getoption("--full") or "full" in config.getoption("markexpr"):
        return
    named = tuple(arg for arg in config.args if "::" in arg)
    rare = [item for item in items if item.get_closest_marker("full") and not item.nodeid.startswith(named)]
    if rare:
        config.hook.pytest_deselected(items=rare)
        items[:] = [item for item in items if item not in set(rare)]


def pytest_collection_finish() -> None:
    """Keep the garbage collector from looking at all imported modules again and again: 5 % of the unit tests' time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """One server for all tests of this process; each makes databases of its own."""
    from tests.postgres_server import PostgresServer

    with PostgresServer() as server:
        yield server


def pytest_runtest_teardown() -> None:
    """Undo the logging of a `treadle` that ran in this process: its stream is closed with the test, and its level would
    add lines to what later tests capture."""
    logging.getLogger("treadle").setLevel(logging.NOTSET)
    root = logging.getLogger()
    for handler in [each for each in root.handlers if type(each) is logging.StreamHandler]:
        root.removeHandler(handler)
