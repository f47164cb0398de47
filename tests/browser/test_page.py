"""The page in a real browser: charts, rollouts, processes, keys."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from bench.page_history import write_run
from tests.browser.conftest import FOREIGN_NAME, NUM_GROUPS, NUM_STEPS, OTHERS, Visit, hub_of
from tests.hub_process import HubProcess

FIRST_CHART = "Reward and held-out accuracy"
CONNECTED = "#connection[data-connection=live]"
SIZES = {"desktop": (1440, 900, "light"), "tablet": (900, 1100, "dark"), "phone": (390, 844, "light")}


# What is written into the canvas of each chart.
RECORD_LABELS = """
    window.labels = {};
    const write = CanvasRenderingContext2D.prototype.fillText;
    CanvasRenderingContext2D.prototype.fillText = function (text, ...rest) {
        const title = this.canvas.closest(".chart")?.dataset.title;
        (window.labels[title] ??= []).push(text);
        return write.call(this, text, ...rest);
    };
"""


def post_group(hub: HubProcess, text: str = "What is new?", **changes: object) -> None:
    turns = [{"role": "user", "content": text}, {"role": "assistant", "content": "This."}]
    group = {
        "tokens": [[1, 2, 3]] * 4, "masks": [[-100, 2, 3]] * 4, "scores": [0.0, 1.0, 0.0, 1.0],
        "inference_logprobs": [[1.0, -0.5, -3.0]] * 4, "messages": [turns] * 4, "env_id": 0,
    }  # fmt: skip
    assert httpx.post(f"{hub.url}/scored_data", json=group | changes).status_code == 200


def chart(page: Any, title: str) -> Any:
    found = page.locator(f'.chart[data-title="{title}"]')
    found.scroll_into_view_if_needed()
    found.locator("canvas").wait_for()
    return found


def picture(found: Any) -> str:
    return found.locator("canvas").evaluate("canvas => canvas.toDataURL()")


def num_healthy_pixels(found: Any) -> int:
    """Those with just the colour of the healthy range, and no line on them."""
    return found.locator("canvas").evaluate(
        """canvas => {
            const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
            let count = 0;
            for (let at = 0; at < data.length; at += 4) {
                count += data[at + 3] > 15 && data[at + 3] < 40 && data[at + 1] > 2 * data[at];
            }
            return count;
        }"""
    )


def drawn_columns(found: Any) -> list[bool]:
    """Of each column of pixels between the axes, whether the first line's colour is in it."""
    return found.locator(".u-over").evaluate(
        """over => {
            const canvas = over.parentElement.querySelector("canvas");
            const scale = canvas.width / canvas.clientWidth;
            const [left, width] = [over.offsetLeft * scale, over.clientWidth * scale].map(Math.round);
            const { data } = canvas.getContext("2d").getImageData(left, 0, width, canvas.height);
            const colour = getComputedStyle(document.documentElement).getPropertyValue("--s0").trim();
            const wanted = [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16));
            const isWanted = (at) => data[at + 3] > 150 && wanted.every((c, n) => Math.abs(data[at + n] - c) < 40);
            const rows = Array.from({ length: canvas.height }, (_, y) => 4 * y * width);
            return Array.from({ length: width }, (_, x) => rows.some((row) => isWanted(row + 4 * x)));
        }"""
    )


def rows(page: Any) -> list[list[str]]:
    return [row.locator("td").all_inner_texts() for row in page.locator("#list tbody tr").all()]


def filtered(page: Any, **fields: str) -> list[list[str]]:
    page.click("#filters button[type=reset]")
    for name, value in fields.items():
        field = page.locator(f"#filters [name={name}]")
        field.select_option(label=value) if name in ("env", "state") else field.fill(value)
    page.click("#filters button[type=submit]")
    page.wait_for_selector("#list[aria-busy=false]")
    return rows(page)


def test_the_charts_have_points_and_nothing_is_asked_of_anybody_else(visit: Visit, still_hub: HubProcess):
    page = visit.open()
    for title in ("Reward and held-out accuracy", "KL", "Ratio", "Clipped tokens", "Entropy", "Gradient norm"):
        page.locator(f'.chart[data-title="{title}"]').scroll_into_view_if_needed()
        page.wait_for_selector(f'.chart[data-title="{title}"] canvas')
        points = int(page.get_attribute(f'.chart[data-title="{title}"]', "data-points"))
        assert points >= NUM_STEPS
    for title in ("Completion length", "Tokens per second", "MFU", "Rollout staleness"):
        chart(page, title)
    parts = chart(page, "Time per step").locator(".u-legend .stack")
    labels = [part.split()[0] for part in parts.locator(".u-label").all_inner_texts()]
    assert labels == ["waiting", "forward", "optimizer", "publishing", "in", "in"]
    assert parts.first.get_attribute("title") == "perf/rollout_wait_s"
    page.wait_for_selector(CONNECTED)
    assert page.inner_text("#words").startswith(f"All {NUM_STEPS} steps are trained; held-out accuracy ")
    assert visit.complaints == []
    assert visit.hosts == {f"127.0.0.1:{still_hub.port}"}


def test_a_finished_run_is_not_called_live(visit: Visit, pictures: Path):
    page = visit.open()
    page.wait_for_selector("#connection.complete")
    assert page.inner_text("#connection") == "complete"
    shown = page.locator("#tiles > div").all()
    tiles = {tile.locator("dt").inner_text(): tile.locator("dd").all_inner_texts() for tile in shown}
    assert [*tiles] == [
        "Held-out accuracy", "Reward (mean score)", "Generated tokens/s", "Trained tokens/s", "Step", "Health",
    ]  # fmt: skip
    assert tiles["Held-out accuracy"] == ["0.0 % → 80.0 %", f"75.0 to 85.0 % (95 % interval), step {NUM_STEPS}"]
    assert tiles["Step"][0] == f"{NUM_STEPS} of {NUM_STEPS}"
    assert tiles["Health"][0] == "no warnings"
    assert "held-out answers are greedy" in page.inner_text(f'.chart[data-title="{FIRST_CHART}"]')
    assert not page.is_visible("#chart-tools"), "behind one button"
    page.screenshot(path=pictures / "complete.png")


def test_a_complete_run_stays_complete_when_its_hub_ends(live_visit: Visit, hub: HubProcess, pictures: Path):
    page = live_visit.open("processes")
    page.wait_for_selector("#connection.complete")
    assert httpx.post(f"{hub.url}/disconnect-env", json={"env_id": 0}).status_code == 200
    page.wait_for_selector("#env-table .state-finished")
    assert "gone" not in page.inner_text("#env-table")
    assert "not running" not in page.inner_text("#process-table")
    hub.end()
    page.wait_for_selector("#connection[data-connection=lost]")
    assert page.inner_text("#connection") == "complete"
    assert "held-out accuracy" in page.inner_text("#words")
    assert page.is_visible("#hub-ended")
    page.screenshot(path=pictures / "complete-without-hub.png")


def test_a_run_is_live_while_its_processes_report(browser: Any, tmp_path: Path, pictures: Path):
    write_run(tmp_path / "run", num_steps=NUM_STEPS, num_groups=NUM_GROUPS)
    settings = tmp_path / "run" / "config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"steps": 2 * NUM_STEPS}))
    with hub_of(tmp_path / "run", tmp_path) as hub:
        context = browser.new_context(viewport={"width": 1440, "height": 900})
        page = Visit(context.new_page(), hub.url).open()
        page.wait_for_selector("#connection.stopped")
        assert page.inner_text("#words") == f"Stopped after step {NUM_STEPS} of {2 * NUM_STEPS}: " + (
            "no process of this run reports to the hub."
        )
        page.screenshot(path=pictures / "stopped.png")
        report = {"kind": "trainer", "name": "trainer", "machine": "elsewhere", "pid": 7, "state": "training"}
        assert httpx.post(f"{hub.url}/v1/reports", json=report).status_code == 200
        page.wait_for_selector("#connection.live")
        assert httpx.post(f"{hub.url}/v1/reports", json=report | {"state": "ended"}).status_code == 200
        page.wait_for_selector("#connection.stopped")
        (tmp_path / "run" / "summary.json").write_text(json.dumps({"last_words": "the engine ended with code 1"}))
        page.wait_for_selector("#connection.failed")
        assert "the engine ended with code 1" in page.inner_text("#words")
        page.screenshot(path=pictures / "failed.png")
        context.close()


def test_charts_wait_for_a_second_step_and_draw_equal_metrics_once(browser: Any, tmp_path: Path, pictures: Path):
    write_run(tmp_path / "run", num_steps=2, num_groups=20)
    metrics = tmp_path / "run" / "metrics.jsonl"
    both = [json.loads(line) for line in metrics.read_text().splitlines()]
    lines = [{k: v for k, v in one.items() if "mfu" not in k} | {"rollout/accuracy": one["reward"]} for one in both]
    metrics.write_text(json.dumps(lines[0]) + "\n")
    for evaluation in sorted((tmp_path / "run" / "evals").iterdir())[1:]:
        evaluation.unlink()
    with hub_of(tmp_path / "run", tmp_path) as hub:
        context = browser.new_context(viewport={"width": 1440, "height": 900})
        visit = Visit(context.new_page(), hub.url)
        visit.page.add_init_script(RECORD_LABELS)
        page = visit.open()
        assert page.inner_text("#overview-note") == "Charts appear after the second step."
        assert page.locator(".chart:visible").count() == 0
        page.screenshot(path=pictures / "first-step.png")
        with metrics.open("a") as file:
            file.write(json.dumps(lines[1]) + "\n")
        page.reload()
        legend = chart(page, FIRST_CHART).locator(".u-legend .line")
        assert legend.count() == 1
        assert legend.locator(".u-label").inner_text() == "mean score = accuracy in training"
        assert legend.get_attribute("title") == "reward = rollout/accuracy"
        assert page.locator('.chart[data-title="MFU"]:visible').count() == 0, "there is no GPU"
        chart(page, "Completion length")  # whose own values are larger than 10
        labels = page.evaluate("window.labels['Completion length']")
        assert {"1", "2"} <= set(labels)
        assert not any("." in label for label in labels), "a step has no fraction"
        assert visit.complaints == []
        context.close()


@pytest.mark.full  # a detail of the page
def test_a_step_without_a_value_is_a_gap_and_what_stands_alone_is_a_dot(browser: Any, tmp_path: Path, pictures: Path):
    write_run(tmp_path / "run", num_steps=NUM_STEPS, num_groups=NUM_GROUPS)
    metrics = tmp_path / "run" / "metrics.jsonl"
    rows_of = [json.loads(line) for line in metrics.read_text().splitlines()]
    without_value = {*range(11, 20), 21, 30}
    nothing = dict.fromkeys(("entropy", "kl", "mean_kl", "mean_ratio", "clipped_fraction", "grad_norm"))
    lines = [json.dumps(row | (nothing if row["step"] in without_value else {})) + "\n" for row in rows_of]
    metrics.write_text("".join(lines))
    with hub_of(tmp_path / "run", tmp_path) as hub:
        context = browser.new_context(viewport={"width": 1440, "height": 900})
        page = Visit(context.new_page(), hub.url).open()
        found = chart(page, "Entropy")
        assert found.get_attribute("data-points") == str(NUM_STEPS - len(without_value))
        page.screenshot(path=pictures / "gaps.png")
        page.click("#options summary")
        page.locator("#smoothing").fill("0")
        drawn = drawn_columns(found)
        context.close()
    steps = {step: drawn[round((step - 1) / (NUM_STEPS - 1) * (len(drawn) - 1))] for step in range(1, NUM_STEPS + 1)}
    assert not any(steps[step] for step in (13, 15, 17))  # in the middle of a long gap
    assert all(steps[step] for step in (5, 20, 25, 35))  # 20 stands alone


def test_hovering_tells_the_values_and_dragging_zooms(visit: Visit):
    page = visit.open()
    plot = page.locator('.chart[data-title="Ratio"] .u-over')
    box = plot.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    legend = page.locator('.chart[data-title="Ratio"] .u-legend')
    step = int(legend.locator(".u-value").first.inner_text())
    assert step in (20, 21)
    series = httpx.get(f"{visit.url}/dash/api/series", params={"names": "mean_ratio"}).json()
    measured = series["values"]["mean_ratio"][series["steps"].index(step)]
    assert float(legend.locator(".line .u-value").inner_text()) == pytest.approx(measured, rel=1e-3)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.75, box["y"] + box["height"] / 2, steps=5)
    page.mouse.up()
    page.wait_for_selector("#overview")
    first, last = int(page.input_value("#first")), int(page.input_value("#last"))
    assert 15 < first < last < 35
    page.wait_for_selector('.chart[data-title="Ratio"]:not([data-points="40"])')
    page.click("#options summary")
    page.click("#zoom-out")
    page.wait_for_selector('.chart[data-title="Ratio"][data-points="40"]')
    assert visit.complaints == []


@pytest.mark.full  # a detail of the page
def test_log_scale_and_smoothing_do_not_change_the_measured_values(visit: Visit):
    page = visit.open()
    found = chart(page, "Gradient norm")
    assert found.locator(".u-legend .faint").count() == 1  # the line as measured, behind the smoothed one
    first = picture(found)
    page.click("#options summary")
    page.locator("#smoothing").fill("0.98")
    smooth = picture(found)
    page.locator("#smoothing").fill("0")
    assert found.locator(".u-legend .faint").count() == 0
    measured = picture(found)
    page.check("#log")
    assert len({first, smooth, measured, picture(found)}) == 4
    page.uncheck("#log")
    assert picture(found) == measured
    assert visit.complaints == []


def test_the_healthy_range_is_drawn_where_there_is_one(visit: Visit):
    page = visit.open()
    assert num_healthy_pixels(chart(page, "Ratio")) > 5_000
    assert "Healthy: 0.8 to 1.2" in chart(page, "Ratio").inner_text()
    assert num_healthy_pixels(chart(page, "Completion length")) < 1_000  # the edges of a green line


@pytest.mark.full  # a detail of the page
def test_several_runs_are_laid_over_each_other_and_taken_away_again(visit: Visit):
    page = visit.open()
    page.click("#options summary")
    for name in OTHERS:
        page.check(f"#compare-list input[value={name}]")
        page.wait_for_selector(f'.chart[data-title="Ratio"] .u-legend >> text="{name}: mean ratio"')
    page.click("#options summary")
    box = page.locator('.chart[data-title="Ratio"] .u-over').bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    values = page.locator('.chart[data-title="Ratio"] .u-legend .other .u-value').all_inner_texts()
    assert len(values) == 2
    assert all(0.5 < float(value) < 1.5 for value in values)
    page.click("#options summary")
    page.uncheck("#compare-list input[value=other]")
    page.wait_for_selector('.chart[data-title="Ratio"] .u-legend >> text="other: mean ratio"', state="detached")
    page.select_option("#add-chart", "rollout/further_1")
    page.wait_for_selector('.chart[data-title="rollout/further_1"] canvas')
    assert visit.complaints == []


def test_the_filters_find_what_they_say(visit: Visit):
    page = visit.open("rollouts")
    page.wait_for_selector(f"#found:has-text('of {NUM_GROUPS} groups')")
    page.wait_for_selector("#found:not(:has-text('so far'))")
    assert {row[1] for row in filtered(page, step="7")} == {"7"}
    assert {row[2] for row in filtered(page, env="gsm8k_0")} == {"gsm8k_0"}
    assert {row[3] for row in filtered(page, state="queued")} == {"queued"}
    assert {row[5] for row in filtered(page, score_from="1")} == {"1"}
    assert all(row[6].endswith("16") or row[6] == "17" for row in filtered(page, length_from="16"))
    assert filtered(page, length_from="500") == []
    assert filtered(page, text="no such words") == []
    assert "0 found among 400 groups searched: all of them" in page.inner_text("#found")
    assert all("The sum is 1" in row[7] for row in filtered(page, text="the sum is 1"))
    assert visit.complaints == []


@pytest.mark.full  # a detail of the page
def test_older_groups_are_paged_to(visit: Visit):
    page = visit.open("rollouts")
    page.wait_for_selector("#list tbody tr")
    newest = [row[0] for row in rows(page)]
    page.click("#older")
    page.wait_for_selector(f'#list tbody tr[data-id="{int(newest[-1]) - 1}"]')
    assert rows(page)[0][0] == str(int(newest[-1]) - 1)


def test_a_group_opens_side_by_side_in_colour_and_keys_move_through_it(visit: Visit):
    visit.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page = visit.open("rollouts")
    page.wait_for_selector("#found:not(:has-text('so far'))")
    filtered(page, score_from="0.5", score_to="0.5")
    page.keyboard.press("Tab")
    page.locator("#list tbody tr").first.focus()
    page.keyboard.press("j")
    second = page.evaluate("document.activeElement.dataset.id")
    page.keyboard.press("Enter")
    page.wait_for_selector(".rollout")
    assert page.locator(".rollout").count() == 4
    assert page.locator(".rollout.best").count() == 2
    assert f"group {second}" in page.inner_text("#group .about >> nth=0")
    shown = page.inner_text(".rollout >> nth=0")
    assert "The sum is" in shown
    assert "parts: correct" in shown
    assert "policy version" in shown
    assert page.inner_text("#group").count("What is") == 1, "the prompt is shown once"
    assert page.inner_text("#prompt .text").startswith("What is")
    boxes = [one.bounding_box() for one in page.locator(".rollout").all()]
    assert len({box["y"] for box in boxes}) == 1, "beside each other"
    assert page.locator(".rollout .p1, .rollout .p2, .rollout .p3, .rollout .p4").count() > 0
    page.locator("#close-group").focus()
    for colour in ("difference", "advantage"):
        page.keyboard.press("t")
        assert page.input_value("#colour") == colour
    page.keyboard.press("l")
    assert page.evaluate("document.activeElement.className").startswith("rollout")
    page.keyboard.press("c")
    page.wait_for_selector("#copied:has-text('copied')")
    copied = json.loads(page.evaluate("navigator.clipboard.readText()"))
    assert len(copied["tokens"]) == 4
    page.keyboard.press("j")
    page.wait_for_selector(f"#group .about:not(:has-text('group {second} '))")
    page.keyboard.press("Escape")
    page.wait_for_selector("#finder:not([hidden])")
    assert visit.complaints == []


def test_tokens_have_the_colour_of_what_the_trainer_found_in_them(visit: Visit):
    page = visit.open("rollouts")
    page.wait_for_selector("#found:not(:has-text('so far'))")
    filtered(page, score_from="0.5", score_to="0.5", state="trained")
    page.locator("#list tbody tr").first.click()
    page.wait_for_selector(".rollout")
    page.select_option("#colour", "difference")
    weaker, stronger = page.locator(".rollout :is(.w1, .w2, .w3)"), page.locator(".rollout :is(.c1, .c2, .c3)")
    assert weaker.count() > 10
    assert stronger.count() > 10
    under = page.locator(".rollout .under").first
    page.locator(".rollout").first.locator(".c2").first.hover()
    difference = float(under.inner_text().split("trainer minus engine ")[1].split(",")[0])
    assert 0.1 < difference <= 0.5
    page.locator(".rollout").first.locator(".w2").first.hover()
    assert "trainer minus engine -0." in under.inner_text()
    page.select_option("#colour", "advantage")
    assert "that the tokens were trained with" in page.inner_text("#colour-note")
    assert page.locator(".rollout.best .u3").count() > 10
    assert page.locator(".rollout:not(.best) .d3").count() > 10
    page.locator(".rollout.best .u3").first.hover()
    assert "advantage 1," in page.locator(".rollout.best .under").first.inner_text()  # what it was trained with
    assert "advantage +1" in page.inner_text(".rollout.best h3 >> nth=0")
    assert visit.complaints == []


def test_an_untrained_group_shows_its_scores_minus_their_mean(live_visit: Visit, hub: HubProcess):
    post_group(hub)
    page = live_visit.open(f"rollouts/{NUM_GROUPS + 1}")
    page.wait_for_selector(".rollout")
    page.select_option("#colour", "difference")
    assert "has not been trained" in page.inner_text("#colour-note")
    assert page.locator(".rollout :is(.w1, .w2, .w3, .c1, .c2, .c3)").count() == 0
    page.select_option("#colour", "advantage")
    page.locator(".rollout.best .u3").first.hover()
    assert "advantage 0.5" in page.locator(".rollout.best .under").first.inner_text()
    assert live_visit.complaints == []


def test_the_figures_of_a_token_can_be_read_by_keyboard(visit: Visit):
    page = visit.open("rollouts/360")
    page.wait_for_selector(".rollout")
    page.locator(".tokens").first.focus()
    under = page.locator(".rollout .under").first
    page.keyboard.press("ArrowRight")
    first = under.inner_text()
    page.keyboard.press("ArrowRight")
    assert first.startswith("token ")
    assert under.inner_text() != first
    page.keyboard.press("ArrowLeft")
    assert under.inner_text() == first


HOSTILE = "<img src=x onerror='window.pwned=1'><script>window.pwned=1</script>"


def test_hostile_text_is_shown_as_text(live_visit: Visit, hub: HubProcess, run_folder: Path):
    registration = {"max_token_length": 64, "desired_name": HOSTILE, "weight": 1.0, "group_size": 4}
    with hub.client() as client:  # environments may register once the trainer has asked for a batch
        client.post("/v1/lease", json={"step": NUM_STEPS + 1, "holder": "trainer"})
        env_id = client.post("/register-env", json=registration).json()["env_id"]
    override = {"outcome": HOSTILE, "parts": {HOSTILE: HOSTILE}, "policy_versions": HOSTILE, "error": [HOSTILE]}
    post_group(hub, HOSTILE, env_id=env_id, overrides=[override] * 4)
    (run_folder / "logs" / "trainer.log").write_text(HOSTILE)
    page = live_visit.open("rollouts")
    page.wait_for_selector("#list tbody tr:has-text('onerror')")
    page.locator("#list tbody tr").first.click()
    page.wait_for_selector(".rollout:has-text('onerror')")
    page.keyboard.press("3")
    page.wait_for_selector("#log-text:has-text('onerror')")
    page.wait_for_selector("#env-table:has-text('onerror')")
    assert page.locator("img, main script").count() == 0
    assert page.evaluate("window.pwned") is None
    assert live_visit.complaints == []


@pytest.mark.full  # a detail of the page
def test_a_huge_group_opens_and_says_what_it_leaves_out(live_visit: Visit, hub: HubProcess):
    rows = [[1] * 4000] * 32
    changes = {"tokens": rows, "masks": rows, "scores": [0.0, 1.0] * 16, "inference_logprobs": None, "messages": None}
    post_group(hub, **changes)
    page = live_visit.open(f"rollouts/{NUM_GROUPS + 1}")
    page.wait_for_selector(".rollout:has-text('2,125 more tokens')")
    assert page.locator(".rollout").count() == 32
    assert live_visit.complaints == []


def test_an_address_leads_straight_to_a_group(visit: Visit):
    page = visit.open("rollouts/17")
    page.wait_for_selector("#group .about:has-text('group 17')")


def test_what_happens_is_shown_as_it_happens(live_visit: Visit, hub: HubProcess):
    page = live_visit.open("rollouts")
    page.wait_for_selector(CONNECTED)
    page.wait_for_selector("#list tbody tr")
    post_group(hub)
    page.wait_for_selector(f'#list tbody tr[data-id="{NUM_GROUPS + 1}"]:has-text("What is new?")')
    assert live_visit.complaints == []


def test_a_step_appears_in_the_charts_when_it_is_trained(live_visit: Visit, hub: HubProcess, run_folder: Path):
    page = live_visit.open()
    page.wait_for_selector(CONNECTED)
    page.wait_for_selector(f'.chart[data-title="Ratio"][data-points="{NUM_STEPS}"]')
    with hub.client() as client:
        step = NUM_STEPS + 1
        batch = client.post("/v1/lease", json={"step": step, "holder": "trainer"}).json()["batch"]
        page.wait_for_selector("#words:has-text('All 40 steps are trained')")
        with (run_folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": step, "mean_ratio": 1.5}) + "\n")
        assert client.post(f"/v1/batches/{step}/ack", json={"token": batch["token"]}).status_code == 200
    page.wait_for_selector(f'.chart[data-title="Ratio"][data-points="{NUM_STEPS + 1}"]')
    assert chart(page, "Ratio").locator(".u-legend .u-value").first.inner_text() == str(NUM_STEPS + 1)
    page.wait_for_selector(f"#tiles dd:has-text('{NUM_STEPS + 1} of {NUM_STEPS}')")
    chart(page, "Queue")  # which has changed
    assert live_visit.complaints == []


def test_a_hub_without_a_run_says_what_it_waits_for(browser: Any, tmp_path: Path):
    with HubProcess(tmp_path) as hub, hub.client() as client:
        context = browser.new_context()
        visit = Visit(context.new_page(), hub.url)
        page = visit.open()
        page.wait_for_selector("#words:has-text('No trainer has registered yet')")
        assert "this hub has no run folder" in page.inner_text("#overview-note")
        registration = {
            "wandb_group": "g", "wandb_project": "p", "batch_size": 8, "max_token_len": 128, "checkpoint_dir": "c",
            "save_checkpoint_interval": 5, "starting_step": 0, "num_steps": 10,
        }  # fmt: skip
        assert client.post("/register", json=registration).status_code == 200
        page.wait_for_selector("#words:has-text('No batch yet: ')")
        assert visit.complaints == []
        context.close()


def test_after_a_restart_of_the_hub_the_page_goes_on_where_it_was(live_visit: Visit, hub: HubProcess):
    page = live_visit.open("rollouts")
    page.wait_for_selector(CONNECTED)
    page.wait_for_selector("#list tbody tr")
    before = page.evaluate("live.numEvents")
    post_group(hub, "before")
    page.wait_for_selector(f'#list tbody tr[data-id="{NUM_GROUPS + 1}"]')
    hub.end()
    page.wait_for_selector("#connection[data-connection=lost]")
    hub.start()
    post_group(hub, "after")  # perhaps before the page is back: it must hear of it all the same
    page.wait_for_selector(CONNECTED)
    page.wait_for_selector(f'#list tbody tr[data-id="{NUM_GROUPS + 2}"]')
    assert page.evaluate("live.numEvents") == before + 2  # each once
    assert [one for one in live_visit.complaints if "ERR_" not in one] == []  # beside the connection that was cut


@pytest.mark.full  # a detail of the page
def test_what_is_asked_for_while_the_hub_is_away_comes_when_it_is_back(live_visit: Visit, hub: HubProcess):
    page = live_visit.open()
    page.wait_for_selector(CONNECTED)
    hub.end()
    page.wait_for_selector("#connection[data-connection=lost]")
    page.click("#options summary")
    page.fill("#first", str(NUM_STEPS - 9))
    page.keyboard.press("Tab")
    hub.start()
    page.wait_for_selector('.chart[data-title="Ratio"][data-points="10"]')
    assert [one for one in live_visit.complaints if "ERR_" not in one] == []


def test_the_processes_their_logs_and_the_weight_syncs_are_shown(visit: Visit):
    page = visit.open("processes")
    page.wait_for_selector("#process-table tbody tr")
    table = page.inner_text("#process-table")
    assert "hub" in table
    assert "running" in table
    page.wait_for_selector("#log-text:has-text('trainer step')")
    page.select_option("#log-name", "engine")
    page.wait_for_selector("#log-text:has-text('engine step')")
    page.wait_for_selector("#sync-timeline rect")
    assert page.locator("#sync-timeline g").count() == NUM_STEPS
    assert "gsm8k_0" in page.inner_text("#env-table")
    assert visit.complaints == []


def test_what_each_process_does_or_waits_for_is_shown_as_it_reports_it(live_visit: Visit, hub: HubProcess):
    page = live_visit.open("processes")
    waits = [{"what": "the batch of step 41", "seconds": 42.0, "of": "env", "is_late": True}]
    hostile = "<img src=x onerror=alert(1)>"
    reports = [
        {"kind": "trainer", "name": "trainer", "machine": "m", "pid": 1, "policy_version": 40, "waits": waits},
        {"kind": "env", "name": "env gsm8k", "machine": "m", "pid": 2, "state": "3 groups in flight",
         "work": {"what": f"evaluating {hostile}", "done": 64, "total": 256}},
    ]  # fmt: skip
    for report in reports:
        assert httpx.post(f"{hub.url}/v1/reports", json=report).status_code == 200
    page.wait_for_selector("#process-table .state-late:has-text('waits 42 s for the batch of step 41')")
    assert f"evaluating {hostile}: 64 of 256" in page.inner_text("#process-table"), "shown, and not obeyed"
    assert live_visit.complaints == []


def test_the_engines_of_a_fleet_are_drawn_over_time(live_visit: Visit, hub: HubProcess):
    page = live_visit.open("processes")
    assert not page.is_visible("#fleet"), "a run with one engine has no table of engines"
    for number in range(2):
        served = {"engine_id": f"e{number}", "url": f"http://a:{number}", "model": "m", "dtype": "float32"}
        report = {"kind": "engine", "name": f"engine-{number}", "machine": "m", "pid": number, "serves": served}
        assert httpx.post(f"{hub.url}/v1/reports", json=report).status_code == 200
    verdicts = [
        {"engine_id": f"e{number}", "url": f"http://a:{number}", "state": state, "reason": "<b>it hangs</b>"}
        for number, state in enumerate(("serving", "out"))
    ]
    assert httpx.post(f"{hub.url}/v1/engines/verdicts", json={"engines": verdicts}).status_code == 200
    page.wait_for_selector("#fleet-timeline .engine-serving")
    page.wait_for_selector("#fleet-timeline .engine-out")
    assert "1 of 2 engines serve" in page.inner_text("#fleet-note")
    assert page.text_content("#fleet-timeline .engine-out title") == "engine-1: out, <b>it hangs</b>"
    assert live_visit.complaints == []


@pytest.mark.full  # a detail of the page
def test_the_views_can_be_reached_by_key_and_the_theme_stays(visit: Visit):
    page = visit.open()
    page.keyboard.press("3")
    assert page.is_visible("#processes")
    page.keyboard.press("2")
    assert page.is_visible("#rollouts")
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.name") == "text"
    page.keyboard.press("Escape")
    page.keyboard.press("1")
    assert page.is_visible("#overview")
    page.keyboard.press("?")
    assert page.is_visible("#help")
    page.keyboard.press("Escape")
    page.click("#theme")
    assert page.get_attribute("html", "data-theme") == "dark"
    page.reload()
    page.wait_for_selector("html[data-theme=dark]")


def test_a_chart_can_be_read_by_keyboard(visit: Visit):
    page = visit.open()
    page.locator('.chart[data-title="Ratio"] .plot').focus()
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    assert "3" in page.inner_text('.chart[data-title="Ratio"] .u-legend')
    page.keyboard.press("Enter")
    page.wait_for_selector("#list[aria-busy=false]:has(tbody tr)")
    assert page.input_value("#filters [name=step]") == "3"
    assert {row[1] for row in rows(page)} == {"3"}


def test_the_page_needs_the_token_in_its_address(browser: Any, run_folder: Path, tmp_path: Path):
    token = "a-token-of-more-than-sixteen"  # noqa: S105
    database = run_folder / "hub.sqlite"
    flags = ("--run-folder", str(run_folder))
    with HubProcess(tmp_path, *flags, database=database, env={"TREADLE_HUB_TOKEN": token}) as hub:
        for path in ("/dash/", "/dash/api/run", "/dash/api/groups", "/dash/app.js"):
            assert httpx.get(hub.url + path).status_code == 401
        context = browser.new_context()
        visit = Visit(context.new_page(), f"{hub.url}/t/{token}")
        page = visit.open("rollouts")
        page.wait_for_selector("#list tbody tr")
        page.wait_for_selector(CONNECTED)
        assert visit.complaints == []
        context.close()


def test_a_foreign_page_reads_nothing(still_hub: HubProcess):
    for headers in ({"Origin": "http://evil.example"}, {"Sec-Fetch-Site": "cross-site"}, {"Origin": "null"}):
        assert httpx.get(f"{still_hub.url}/dash/api/run", headers=headers).status_code == 403
    for path in ("/dash/", "/dash/app.js", "/dash/api/groups", "/v1/events", "/v1/status"):
        foreign = {"Host": f"{FOREIGN_NAME}:{still_hub.port}"}
        assert httpx.get(still_hub.url + path, headers=foreign).status_code == 403
        assert (
            httpx.get(still_hub.url + path, headers=foreign | {"Origin": f"http://{foreign['Host']}"}).status_code
            == 403
        )
    own = {"Origin": still_hub.url}
    assert httpx.get(f"{still_hub.url}/dash/app.js", headers=own).status_code == 200
    assert httpx.post(f"{still_hub.url}/v1/reset", headers=own).status_code == 403


def test_a_foreign_name_that_leads_to_this_machine_is_refused_to_a_browser(visit: Visit, still_hub: HubProcess):
    answer = visit.page.goto(f"http://{FOREIGN_NAME}:{still_hub.port}/dash/")
    assert answer.status == 403
    read = "fetch('/dash/api/groups').then(answer => answer.status)"
    assert visit.page.evaluate(read) == 403


@pytest.mark.parametrize("size", SIZES)
def test_every_view_fits_its_screen(browser: Any, still_hub: HubProcess, pictures: Path, size: str):
    width, height, scheme = SIZES[size]
    context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
    visit = Visit(context.new_page(), still_hub.url)
    page = visit.open()
    for view, key, ready in (
        ("overview", "1", "canvas"), ("rollouts", "2", "#list tbody tr"), ("processes", "3", "#sync-timeline rect"),
    ):  # fmt: skip
        page.keyboard.press(key)
        page.wait_for_selector(ready)
        page.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
        page.screenshot(path=pictures / f"{size}-{view}.png")
        assert page.evaluate("document.documentElement.scrollWidth") <= width, view
        if view == "overview":
            first = page.locator("canvas").first.bounding_box()
            assert first["y"] + first["height"] <= height, "the first chart is seen without scrolling"
            assert page.locator("#tiles").bounding_box()["y"] < first["y"]
    page.keyboard.press("2")
    page.locator("#list tbody tr").first.click()
    page.wait_for_selector(".rollout")
    page.screenshot(path=pictures / f"{size}-group.png")
    lefts = {one.bounding_box()["x"] for one in page.locator(".rollout").all()}
    assert (len(lefts) == 1) == (size == "phone"), "stacked on a phone, else beside each other"
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.get_attribute("html", "data-theme") == scheme
    assert visit.complaints == []
    context.close()
