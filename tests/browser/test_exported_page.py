"""The page exported into one file, opened from the disk: the report of a run, and the groups of a file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.page_history import write_run
from tests.written_run import evaluation, write_finished, write_health
from treadle.dash.export import write_export
from treadle.envs.group_file import Verdict, WrittenGroup
from treadle.envs.group_writer import page_answers
from treadle.report.comparison_output import write_comparison
from treadle.report.page import NUM_GROUPS, write_report

NUM_STEPS = 40
SIZES = {"wide": (1440, 900, "light"), "dark": (1200, 900, "dark"), "phone": (390, 844, "light")}
HOSTILE = "</script><script>document.title = 'hit'</script><img src=x onerror=alert(1)>"


class Opened:
    """A file in a browser, with all errors, warnings and requests."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self.problems: list[str] = []
        self.requests: list[str] = []
        page.on("console", lambda message: self.problems.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: self.problems.append(str(error)))
        page.on("request", lambda request: self.requests.append(request.url))

    def open(self, file: Path) -> Any:
        self.page.goto(file.as_uri())
        self.page.wait_for_selector("html[data-drawn=yes]")
        return self.page


@pytest.fixture(params=[*SIZES])
def opened(browser: Any, request: pytest.FixtureRequest) -> Iterator[Opened]:
    width, height, scheme = SIZES[request.param]
    context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
    context.set_default_timeout(20_000)
    yield Opened(context.new_page())
    context.close()


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "20260102-030405-arithmetic"
    write_run(folder, num_steps=NUM_STEPS, num_groups=100)
    for step in (0, NUM_STEPS):
        values = evaluation(step, {HOSTILE: step > 0, "What is 1 + 1?": False}, 0.1 + step / 100)
        (folder / "evals" / f"step-{step:06d}.json").write_text(json.dumps(values))
    write_health(folder, (7, HOSTILE))
    assert write_report(folder, None) == 0
    return folder / "report.html"


@pytest.fixture(scope="module")
def groups(tmp_path_factory: pytest.TempPathFactory) -> Path:
    texts = ["It is 4.", "It is 5."]
    made = [
        WrittenGroup(
            tokens=[[1, *map(ord, text)] for text in texts],
            masks=[[-100, *map(ord, text)] for text in texts],
            scores=[float(number % 3), 0.0],
            inference_logprobs=[[1.0] + [-0.01] * 6 + [-3.0, -0.01] for _ in texts],
            messages=[[{"role": "user", "content": f"{HOSTILE} {number}?"}, {"role": "assistant", "content": text}]
                      for text in texts],
            item=number,
            answer="4",
            verdicts=[Verdict(rollout=0, is_right=number % 3 > 0, reward=float(number % 3)),
                      Verdict(rollout=1, is_right=False, reward=None, outcome="timed_out", error="after 10 s")],
            pieces=[list(text) for text in texts],
        )
        for number in range(250)
    ]  # fmt: skip
    file = tmp_path_factory.mktemp("data") / "arithmetic.html"
    write_export(file, "arithmetic.jsonl", page_answers("arithmetic.jsonl", made))
    return file


def fits(page: Any) -> bool:
    return page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_a_report_shows_its_charts_examples_and_groups_from_a_file(opened: Opened, report: Path, pictures: Path):
    page = opened.open(report)
    size = page.viewport_size["width"]
    assert page.inner_text("#connection") == "unfinished"
    assert page.inner_text("#words") == "Not complete: 40 of 40 steps."
    assert "Held-out accuracy was 10.0 %" in page.inner_text("#verdict")
    first = page.locator('.chart[data-title="Reward and held-out accuracy"]')
    first.locator("canvas").wait_for()
    assert int(first.get_attribute("data-points")) >= NUM_STEPS
    assert page.evaluate("scrollY") == 0
    page.screenshot(path=pictures / f"report-{size}.png")
    page.locator("#first").evaluate("field => { field.value = 10; field.dispatchEvent(new Event('change')); }")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    shown = page.locator(".chart:not([hidden])")
    assert shown.count() == shown.locator("canvas").count() > 10, "all charts are drawn for paper"
    assert page.locator("#report").inner_text().count("document.title") >= 4
    page.keyboard.press("2")
    assert page.locator("#list tbody tr").count() == NUM_GROUPS
    page.locator("#list tbody tr").first.click()
    assert page.locator(".rollout").count() == 4
    assert page.locator(".tokens .p1, .tokens .p2").count() > 0
    assert page.inner_text("#prompt .text").startswith("What is ")
    assert fits(page)
    page.screenshot(path=pictures / f"report-group-{size}.png")
    assert page.title() != "hit"
    assert opened.problems == []
    assert opened.requests == [report.as_uri()]


def test_a_file_of_groups_can_be_filtered_searched_and_opened(opened: Opened, groups: Path, pictures: Path):
    page = opened.open(groups)
    size = page.viewport_size["width"]
    rows = page.locator("#list tbody tr")
    assert rows.count() == 200
    assert "200 shown of 250 groups" in page.inner_text("#found")
    assert rows.first.locator(".bars i").count() == 2
    page.screenshot(path=pictures / f"groups-{size}.png")
    page.select_option("[name=order]", "highest")
    page.fill("[name=score_from]", "1")
    page.wait_for_function("document.getElementById('found').textContent.includes('166 match')")
    assert rows.first.locator("td").first.inner_text() == "3"
    page.fill("[name=text]", "alert 248?")
    page.wait_for_function("document.querySelectorAll('#list tbody tr').length === 1")
    rows.first.click()
    cards = page.locator(".rollout")
    assert [card.locator("h3").inner_text().split("\n")[:3] for card in cards.all()][1][1] == "not scored"
    assert cards.first.locator("h3 .right").inner_text() == "right"
    assert "timed_out; after 10 s" in cards.nth(1).inner_text()
    assert cards.first.locator(".tokens .p4").inner_text() == "4"
    assert page.inner_text("#prompt").endswith("expected: 4")
    assert HOSTILE in page.inner_text("#prompt .text")
    assert fits(page)
    page.screenshot(path=pictures / f"groups-group-{size}.png")
    assert opened.problems == []
    assert opened.requests == [groups.as_uri()]


def test_a_comparison_shows_a_curve_with_a_band_for_each_group(tmp_path: Path, opened: Opened, pictures: Path):
    folders = [
        write_finished(tmp_path / f"{name}-{seed}", right[:seed], seed=seed, reward=0.1 * seed, **{"train.lr": lr})
        for name, right, lr in (("slow", "abcd", 1e-6), ("fast", "bcde", 1e-5))
        for seed in (1, 2, 3)
    ]
    assert write_comparison(folders, None, is_json=False) == 0
    page = opened.open(tmp_path / "comparison.html")
    page.locator(".chart[data-title='Held-out accuracy'] canvas").wait_for()
    reward = page.locator(".chart[data-title='Reward (mean score)']")
    assert reward.locator(".u-legend .line").all_inner_texts() != []
    assert reward.locator(".u-legend .edge").count() == 4, "two edges of a band for each group"
    page.fill("#smoothing", "0")
    page.check("#log")
    page.click("#zoom-out")
    page.click("#theme")
    page.click("#answers summary >> nth=0")
    assert page.locator("#figures tbody tr").count() == 9, "six runs, two means, one setting"
    assert page.locator("#answers .example").count() > 0
    page.screenshot(path=pictures / f"comparison-{page.viewport_size['width']}.png", full_page=True)
    assert page.evaluate("document.documentElement.scrollWidth") <= page.viewport_size["width"]
    assert opened.problems == []
    assert all(url.startswith("file:") for url in opened.requests)
