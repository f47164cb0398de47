"""The start page of a folder of runs (`treadle dash FOLDER`), in a real browser."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from bench.page_history import write_run
from tests.browser.conftest import FOREIGN_NAME, Visit
from tests.e2e.processes import environment

NEWEST, OLDEST = "20260103-091500-gsm8k", "20260102-030405-arithmetic"
ELSEWHERE, FAR = "20260101-000000-echo", "http://gpu7.invalid:8000"  # its hub is on another machine
NUM_STEPS = 4
MODEL = "/home/ada/models/2026-01/qwen-tuned"


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    for name, planned in ((OLDEST, NUM_STEPS), (NEWEST, 9)):
        folder = tmp_path / "runs" / name
        write_run(folder, num_steps=NUM_STEPS, num_groups=20)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(
            json.dumps(config | {"steps": planned, "model": MODEL, "hub": {"database": "hub.sqlite"}})
        )
        (folder / "request.json").write_text("{}")
    (tmp_path / "runs" / ELSEWHERE).mkdir()
    far = {"env": {"name": "echo"}, "hub_url": FAR, "train": {"hub_url": f"{FAR}/t/secret"}}
    (tmp_path / "runs" / ELSEWHERE / "config.json").write_text(json.dumps(far))
    (tmp_path / "runs" / ELSEWHERE / "request.json").write_text("{}")
    (tmp_path / "runs" / "notes").mkdir()
    command = [sys.executable, "-m", "treadle", "dash", str(tmp_path / "runs"), "--no-open"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment()) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().removeprefix("page: ").partition(";")[0].rstrip("/")
        finally:
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == 0


def test_the_start_page_lists_the_runs_and_a_click_opens_one(browser: Any, url: str, pictures: Path):
    context = browser.new_context(viewport={"width": 390, "height": 844})
    visit = Visit(context.new_page(), url)
    page = visit.page
    page.goto(url)
    page.wait_for_selector("#runs tbody tr")
    rows = [row.locator("td").all_inner_texts() for row in page.locator("#runs tbody tr").all()]
    assert [row[-1] for row in rows] == [NEWEST, OLDEST, ELSEWHERE], "the newest first"
    assert rows.pop()[0] == f"echo at {FAR}"
    page.click(f"#runs tr:has-text('{ELSEWHERE}') .badge")
    link = page.locator(f"#runs tr:has-text('{ELSEWHERE}') a")
    assert link.get_attribute("href") == f"{FAR}/dash/", "only the link leads to another host, and not the row"
    assert [row[1] for row in rows] == ["stopped", "stopped"]
    assert rows[1][2].startswith("0.0 % → 80.0 %")
    assert [row[3] for row in rows] == [f"{NUM_STEPS} of 9", f"{NUM_STEPS} of {NUM_STEPS}"]
    assert {row[4] for row in rows} == {"qwen-tuned"}
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    page.screenshot(path=pictures / "start.png")
    for name in (NEWEST, OLDEST):
        page.check(f"#runs tr:has-text('{name}') input")
    page.click("#compare-picked")
    page.wait_for_selector("html[data-drawn=yes]")
    assert page.locator(".chart canvas").count() > 0
    page.click("#all-runs")
    page.wait_for_selector("#runs tbody tr")
    page.click(f"#runs tr:has-text('{OLDEST}') a")
    page.wait_for_selector("html[data-drawn=yes]")
    page.wait_for_selector("#connection.complete")
    assert page.inner_text("#task") == "arithmetic/addition", "the task is shown whatever the model's path"
    page.wait_for_selector("#connection[data-connection=live]")
    page.click("#tab-rollouts")
    page.wait_for_selector("#list tbody tr")
    page.click("#all-runs")
    page.wait_for_selector("#runs tbody tr")
    assert visit.complaints == []
    for headers in ({"Sec-Fetch-Site": "same-site"}, {"Host": FOREIGN_NAME}):
        for path in ("/api/runs", f"/runs/{NEWEST}/dash/"):
            assert httpx.get(url + path, headers=headers).status_code == 403
    for path in ("/batch", "/v1/reset", "/dash/../batch", "/dash/..%2f..%2fbatch", "/openapi.json", "/t/x/batch"):
        assert httpx.get(f"{url}/runs/{OLDEST}{path}").status_code == 404, "only what the page reads is forwarded"
    for path in ("/runs/notes/dash/", "/runs/..%2f..%2fetc/dash/", "/runs_page.py"):
        assert httpx.get(url + path).status_code == 404
    context.close()
