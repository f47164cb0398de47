"""A real browser on a real hub: the system's Chromium (scripts/setup-browser.sh), which Playwright drives.

Without one these tests fail: a page that nobody opened was not tested.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import sync_playwright

from bench.page_history import write_metrics, write_run
from tests.hub_process import HubProcess

CHROMIUMS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
NUM_STEPS, NUM_GROUPS = 40, 400
OTHERS = ("other", "third")
FOREIGN_NAME = "rebound.example"  # leads to this machine, as a foreign page's name may be made to


class Visit:
    """A page in a browser of its own, with all that it complained of and all that it asked for."""

    def __init__(self, page: Any, url: str) -> None:
        self.page = page
        self.url = url
        self.complaints: list[str] = []
        self.hosts: set[str] = set()
        page.on("console", self._console)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("request", lambda request: self.hosts.add(urlsplit(request.url).netloc))

    def _console(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(f"{message.type}: {message.text}")

    def open(self, view: str = "overview") -> Any:
        self.page.goto(f"{self.url}/dash/#{view}")
        self.page.wait_for_selector("html[data-drawn=yes]")
        return self.page


@pytest.fixture(scope="module")  # Playwright's event loop runs in this thread: other files need it without one
def browser() -> Iterator[Any]:
    found = next((path for name in CHROMIUMS if (path := shutil.which(name))), None)
    assert found is not None, "no Chromium is installed; install one: scripts/setup-browser.sh"
    with sync_playwright() as driver:
        arguments = ["--no-sandbox", f"--host-resolver-rules=MAP {FOREIGN_NAME} 127.0.0.1"]
        started = driver.chromium.launch(executable_path=found, args=arguments)
        yield started
        started.close()


@pytest.fixture(scope="module")
def made_up_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A made-up run of forty steps, and others beside it to compare with."""
    runs = tmp_path_factory.mktemp("runs")
    write_run(runs / "own", num_steps=NUM_STEPS, num_groups=NUM_GROUPS)
    for seed, name in enumerate(OTHERS, start=1):
        (runs / name).mkdir()
        write_metrics(runs / name, 30, seed=seed)
    return runs


@pytest.fixture(scope="module")
def still_hub(made_up_runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubProcess]:
    """For tests that only look."""
    folder = tmp_path_factory.mktemp("still")
    with hub_of(copied(made_up_runs, folder), folder) as started:
        yield started


@pytest.fixture
def visit(browser: Any, still_hub: HubProcess) -> Iterator[Visit]:
    yield from visits(browser, still_hub)


@pytest.fixture
def run_folder(made_up_runs: Path, tmp_path: Path) -> Path:
    return copied(made_up_runs, tmp_path)


@pytest.fixture
def hub(run_folder: Path, tmp_path: Path) -> Iterator[HubProcess]:
    """For tests that change something."""
    with hub_of(run_folder, tmp_path) as started:
        yield started


@pytest.fixture
def live_visit(browser: Any, hub: HubProcess) -> Iterator[Visit]:
    yield from visits(browser, hub)


def copied(runs: Path, folder: Path) -> Path:
    """The folder of the run that is looked at, with the others beside it."""
    return Path(shutil.copytree(runs, folder / "runs")) / "own"


def hub_of(run_folder: Path, folder: Path) -> HubProcess:
    return HubProcess(folder, "--run-folder", str(run_folder), database=run_folder / "hub.sqlite")


def visits(browser: Any, hub: HubProcess) -> Iterator[Visit]:
    context = browser.new_context(viewport={"width": 1440, "height": 900})
    context.set_default_timeout(20_000)
    yield Visit(context.new_page(), hub.url)
    context.close()


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """Where screenshots go: TREADLE_PICTURES keeps them."""
    folder = Path(os.environ.get("TREADLE_PICTURES", tmp_path / "pictures"))
    folder.mkdir(parents=True, exist_ok=True)
    return folder
