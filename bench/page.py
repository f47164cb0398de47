"""Measure how fast the page of a long run loads: python bench/page.py FOLDER [--chromium PATH] [--loads 5]

FOLDER is the output of bench/page_history.py. Needs `pip install playwright` and an installed Chromium. Prints a table
as Markdown: milliseconds from the start of the navigation, for the first load after the hub's start and the median of
further loads, each in a browser with an empty cache.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, sync_playwright

PORT = 8497
URL = f"http://127.0.0.1:{PORT}"
TIMES = """() => ({
    "first paint": performance.getEntriesByName("first-contentful-paint")[0]?.startTime,
    "charts drawn": performance.getEntriesByName("charts-drawn")[0]?.startTime,
})"""


def start_hub(folder: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "treadle", "hub", "--port", str(PORT)]
    hub = subprocess.Popen([*command, "--database", str(folder / "hub.sqlite"), "--run-folder", str(folder)])
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    for _ in range(300):
        try:
            opener.open(f"{URL}/healthz", timeout=1).close()
        except OSError:
            time.sleep(0.1)
        else:
            return hub
    hub.kill()
    raise SystemExit("the hub did not start within 30 s")


def one_load(browser: Browser) -> dict[str, float]:
    context = browser.new_context(viewport={"width": 1440, "height": 900})
    page = context.new_page()
    page.goto(f"{URL}/dash/")
    page.wait_for_selector("html[data-drawn=yes]", timeout=30_000)
    times: dict[str, Any] = page.evaluate(TIMES)
    times["list of rollouts"] = took(lambda: (page.keyboard.press("2"), page.wait_for_selector("#list tbody tr")))
    times["filter by step"] = took(lambda: find(page, "step", "4321"))
    times["a group opens"] = took(
        lambda: (page.locator("#list tbody tr").first.click(), page.wait_for_selector(".rollout"))
    )
    context.close()
    return {name: float(value) for name, value in times.items()}


def find(page: Any, field: str, value: str) -> None:
    with page.expect_response(lambda response: "/api/groups?" in response.url):
        page.fill(f"#filters [name={field}]", value)
        page.keyboard.press("Enter")
    page.wait_for_selector("#list tbody tr")


def took(act: Any) -> float:
    began = time.perf_counter()
    act()
    return (time.perf_counter() - began) * 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--chromium", default="/usr/bin/chromium-headless-shell")
    parser.add_argument("--loads", type=int, default=5)
    values = parser.parse_args()
    hub = start_hub(values.folder)
    try:
        with sync_playwright() as driver:
            browser = driver.chromium.launch(executable_path=values.chromium, args=["--no-sandbox"])
            browser.new_page().close()
            first = one_load(browser)
            further = [one_load(browser) for _ in range(values.loads)]
            browser.close()
    finally:
        hub.terminate()
        hub.wait(10)
    print("| ms | first load | median of further ones |\n|---|---|---|")
    for name, value in first.items():
        print(f"| {name} | {value:.0f} | {statistics.median(load[name] for load in further):.0f} |")


if __name__ == "__main__":
    main()
