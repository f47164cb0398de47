"""The address of a run's page: told without the token, opened with it."""

from __future__ import annotations

import webbrowser
from pathlib import Path

import pytest

from treadle.config.schema import HubConfig, RunConfig
from treadle.launch.page import RunPage

URL = "http://127.0.0.1:8000"
TOKEN = "a-token-of-more-than-sixteen"  # noqa: S105


def test_without_a_token_the_address_is_the_hubs():
    page = RunPage(RunConfig(), URL, {})
    assert page.shown_url == page.address() == f"{URL}/dash/"


def test_a_token_from_the_environment_is_opened_and_not_told():
    page = RunPage(RunConfig(), URL, {"TREADLE_HUB_TOKEN": TOKEN})
    assert TOKEN not in page.shown_url
    assert page.address() == f"{URL}/t/{TOKEN}/dash/"


def test_a_token_from_a_file_is_opened_and_not_told(tmp_path: Path):
    file = tmp_path / "hub.token"
    file.write_text(TOKEN + "\n")
    page = RunPage(RunConfig(hub=HubConfig(token_file=file)), URL, {})
    assert TOKEN not in page.shown_url
    assert page.address() == f"{URL}/t/{TOKEN}/dash/"


def no_browser() -> webbrowser.BaseBrowser:
    raise webbrowser.Error("could not locate runnable browser")


def text_browser() -> webbrowser.BaseBrowser:
    return webbrowser.GenericBrowser("w3m")


def window_browser() -> webbrowser.BaseBrowser:
    return webbrowser.BackgroundBrowser("xdg-open")


@pytest.mark.parametrize(
    ("find", "environment", "is_able"),
    [
        (no_browser, {}, False),
        (text_browser, {}, False),
        (text_browser, {"BROWSER": "w3m"}, True),
        (window_browser, {}, True),
    ],
)
def test_where_no_window_can_be_opened_the_user_is_told_to_do_it(find, environment, is_able):
    page = RunPage(RunConfig(), URL, environment, find)
    told = page.announcement(opens=True)
    assert told.startswith(f"page: {URL}/dash/")
    assert ("open it by hand" in told) != is_able
    assert page.announcement(opens=False) == f"page: {URL}/dash/"
