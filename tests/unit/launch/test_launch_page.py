"""The address of a run's page: told without the token, opened with it."""

from __future__ import annotations

import webbrowser

import pytest

from treadle.launch.page import RunPage

URL = "http://127.0.0.1:8000"
TOKEN = "a-token-of-more-than-sixteen"  # noqa: S105


def test_without_a_token_the_address_is_the_hubs():
    page = RunPage(URL, URL, {})
    assert page.shown_url == page.address() == f"{URL}/dash/"


def test_a_token_is_opened_and_not_shown():
    page = RunPage(URL, f"{URL}/t/{TOKEN}", {})
    assert TOKEN not in page.shown_url + repr(page)
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
    page = RunPage(URL, URL, environment, find)
    told = page.announcement(opens=True)
    assert told.startswith(f"page: {URL}/dash/")
    assert ("open it by hand" in told) != is_able
    assert page.announcement(opens=False) == f"page: {URL}/dash/"
