"""The report as a page: what it shows of a run, what it never shows, and what no completion can do to it."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.written_run import evaluation, write_health, write_run
from treadle.config.load import save_run
from treadle.config.schema import RunConfig
from treadle.launch.charts import Chart, Series, draw, ticks
from treadle.launch.folder import load_versions, save_versions
from treadle.launch.history import History
from treadle.launch.report import Outcome, save_summary, summarize
from treadle.launch.report_charts import charts_of, distinct, points_of, time_of_a_step
from treadle.launch.report_page import Facts, gather, in_words, render, settings_of

HOSTILE = "</pre><script>alert(1)</script><img src=x onerror=alert(2)> {{ 7 * 7 }}"


class Elements(HTMLParser):
    """Every element of a page, and whether each was closed."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag not in ("meta", "br", "img"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def a_run(folder: Path, *, num_steps: int = 50, is_evaluated: bool = True, is_summarized: bool = True) -> RunConfig:
    config = write_run(folder, num_steps=num_steps, is_evaluated=is_evaluated)
    save_run(config, folder / "config.json")
    (folder / "request.json").write_text(json.dumps({"steps": 50, "train": {"lr": 1e-5}}))
    if is_summarized:
        history = gather(folder).history
        outcome = Outcome(True, 300.0, 5_000_000_000, {"trainer": 3_000_000_000, "engine": 2_000_000_000})
        save_summary(summarize(config, folder, history, outcome), folder)
    return config


def text_of(page: str) -> str:
    shown = re.sub(r"<style>.*?</style>", "", page, flags=re.DOTALL)
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", shown)).split())


def test_a_finished_run_is_told_in_words_charts_and_tables(tmp_path: Path) -> None:
    a_run(tmp_path)
    write_health(tmp_path, (7, "mean_kl 0.61 (usual 0.01 to 0.1)"))
    page = render(gather(tmp_path))
    text = text_of(page)
    assert "was 1.6 % (0.6 to 3.6) before training and 73.0 % (72.0 to 75.0) at step 50, on 256 prompts" in text
    assert "The mean score of these answers was 0.008 and 0.365." in text
    assert "held-out mean score 0.365" in text
    assert "generated tokens per second 812" in text
    assert "trained tokens per second 412" in text
    assert "step 7: mean_kl 0.61 (usual 0.01 to 0.1)" in text
    assert "2 became right, 0 became wrong, 1 right both times, 2 wrong both times" in text
    assert "5.00 GB over all processes" in text
    titles = re.findall(r"<figcaption>([^<]+)", page)
    assert [title.strip() for title in titles] == ["reward", "tokens per second", "rollout staleness"]


def test_the_sampling_note_is_left_out_with_several_environments(tmp_path: Path) -> None:
    config = a_run(tmp_path)
    assert "held-out answers are greedy" in text_of(render(gather(tmp_path)))
    tables = [{**config.env.model_dump(), "name": name, "wandb_name": name} for name in ("arithmetic", "echo")]
    for table in tables:
        table["data_dir_to_save_evals"] = folder = tmp_path / "evals" / table["name"]
        shutil.copytree(tmp_path / "evals", folder, ignore=lambda _, names: {"arithmetic", "echo"} & set(names))
    save_run(RunConfig.model_validate({**config.model_dump(), "envs": tables}), tmp_path / "config.json")
    text = text_of(render(gather(tmp_path)))
    assert "73.0 %" in text
    assert "held-out answers are" not in text


def test_a_page_loads_nothing_and_runs_nothing(tmp_path: Path) -> None:
    a_run(tmp_path)
    page = render(gather(tmp_path))
    elements = Elements(page)
    assert elements.open == []
    assert not {tag for tag, _ in elements.found} & {"script", "img", "link", "iframe", "object", "form", "a"}
    assert not [name for _, attrs in elements.found for name in attrs if name.startswith("on") or name == "src"]
    assert "url(" not in page
    assert "default-src 'none'" in page


def test_what_a_model_wrote_is_text_and_nothing_else(tmp_path: Path) -> None:
    a_run(tmp_path)
    for step in (0, 50):
        values = evaluation(step, {HOSTILE: step > 0}, 0.5)
        values["samples"][0] |= {"completion": HOSTILE, "gold": HOSTILE}
        (tmp_path / "evals" / f"step-{step}.json").write_text(json.dumps(values))
    write_health(tmp_path, (3, HOSTILE))
    config = json.loads((tmp_path / "config.json").read_text())
    config["env"]["system_prompt"] = HOSTILE
    (tmp_path / "config.json").write_text(json.dumps(config))
    page = render(gather(tmp_path))
    elements = Elements(page)
    assert not {tag for tag, _ in elements.found} & {"script", "img"}
    assert elements.open == []
    assert text_of(page).count("alert(1)") >= 5
    assert "{{ 7 * 7 }}" in text_of(page)


def test_keys_are_not_shown(tmp_path: Path) -> None:
    a_run(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["openai"]["api_key"] = "sk-very-secret"
    config["engine"]["vllm_args"] = "--api-key sk-very-secret --seed 3"
    config["env"]["rollout_server_url"] = "http://hub:8000/t/sk-very-secret"
    (tmp_path / "config.json").write_text(json.dumps(config))
    page = render(gather(tmp_path))
    assert "sk-very-secret" not in page
    assert "--api-key (not shown) --seed 3" in text_of(page)


def test_what_was_asked_for_is_told_apart_from_what_was_settled(tmp_path: Path) -> None:
    config = a_run(tmp_path)
    settings = {one.key: one for one in settings_of(config, frozenset({"steps"}))}
    assert settings["steps"].differs
    assert settings["steps"].is_asked_for
    assert settings["train.metrics_file"].differs
    assert not settings["train.metrics_file"].is_asked_for
    assert not settings["env.temperature"].differs


def test_an_unfinished_run_has_a_page_too(tmp_path: Path) -> None:
    a_run(tmp_path, num_steps=12, is_evaluated=False, is_summarized=False)
    text = text_of(render(gather(tmp_path)))
    assert "not complete: 12 of 50 steps" in text
    assert "it has not been measured since" in text
    assert "None: no prompt was evaluated both before and after." in text


def test_a_run_that_has_written_nothing_yet_has_a_page(tmp_path: Path) -> None:
    save_run(RunConfig(), tmp_path / "config.json")
    text = text_of(render(gather(tmp_path)))
    assert "No step has been taken yet." in text
    assert "Held-out accuracy was not measured." in text


def test_intervals_that_overlap_are_called_what_they_are(tmp_path: Path) -> None:
    a_run(tmp_path)
    (tmp_path / "evals" / "step-50.json").write_text(json.dumps(evaluation(50, {"a": True}, 0.02)))
    assert "The intervals overlap: the difference may be chance." in in_words(gather(tmp_path))


def test_versions_are_told_where_they_were_recorded(tmp_path: Path) -> None:
    a_run(tmp_path)
    assert "torch not recorded" in text_of(render(gather(tmp_path)))
    save_versions(tmp_path)
    (tmp_path / "logs").mkdir()
    line = "2026-01-02T03:04:05.678 INFO    engine loaded engine=vllm version=0.32.0 model=/m device=cpu seconds=9\n"
    (tmp_path / "logs" / "engine.log").write_text(line * 2)
    facts = gather(tmp_path)
    assert facts.engines == ("vllm 0.32.0",)
    assert load_versions(tmp_path)["python"] == ".".join(map(str, sys.version_info[:3]))
    assert "torch not recorded" not in text_of(render(facts))


def test_late_waits_in_any_log_are_alarms(tmp_path: Path) -> None:
    a_run(tmp_path)
    (tmp_path / "logs").mkdir()
    line = (
        '2026-01-02T03:04:05.678 ERROR   watchdog late for="the engine to adopt version 17" seconds=181 turn_of=engine'
    )
    (tmp_path / "logs" / "trainer.log").write_text(f"Stack:\n{line}\n")
    facts: Facts = gather(tmp_path)
    assert len(facts.alarms) == 1
    assert 'trainer: late for="the engine to adopt version 17"' in text_of(render(facts))


def test_a_step_that_trained_no_token_says_nothing_of_the_policy() -> None:
    steps = ({"step": 1, "entropy": 0.0, "batch/forwarded_tokens_per_step": 0}, {"step": 2, "entropy": 1.5})
    assert points_of(History(steps), "entropy") == ((2.0, 1.5),)


def test_a_line_is_broken_where_a_step_has_no_value() -> None:
    values = [0.9, 0.8, None, 0.6, 0.5]
    steps = tuple({"step": step, "entropy": value, "reward": 0.1 * step} for step, value in enumerate(values, start=1))
    by_title = {chart.title: draw(chart) for chart in charts_of(History(steps)) if not chart.is_empty}
    assert by_title["entropy"].count("<polyline") == 4  # two pieces, faint and smoothed
    assert by_title["entropy"].count('class="hint"') == 4
    assert by_title["reward"].count("<polyline") == 2


def test_a_few_steps_without_a_value_do_not_break_a_line_of_means() -> None:
    steps = [float(step) for step in range(1, 3001)]
    gaps = tuple(step for step in steps if step % 100 == 0 or 1000 <= step < 1200)
    points = tuple((step, 1.0) for step in steps if step not in gaps)
    assert draw(Chart("x", (Series("a", points, gaps=gaps),))).count("<polyline") == 2  # at the two hundred only


def test_the_parts_of_a_step_add_up_to_it() -> None:
    parts = {"perf/rollout_wait_s": 1.0, "perf/fwd_bwd_s": 2.0, "perf/optimizer_s": 0.5, "perf/weight_sync_s": 0.25}
    chart = time_of_a_step(History(({"step": 1, "perf/step_s": 4.0, **parts}, {"step": 2, "perf/step_s": 9.0})))
    assert [series.points for series in chart.series] == [
        ((1.0, 1.0),), ((1.0, 2.0),), ((1.0, 0.5),), ((1.0, 0.25),), ((1.0, 0.25),),
    ]  # fmt: skip


def test_one_tall_step_does_not_hide_the_others() -> None:
    calm = tuple((float(step), 1.0) for step in range(1, 100))
    assert Chart("time", (Series("a", calm),), is_stacked=True).cut_at is None
    assert Chart("time", (Series("a", (*calm, (100.0, 50.0))),), is_stacked=True).cut_at == pytest.approx(1.1)


def test_a_line_that_another_covers_is_named_with_it() -> None:
    points = ((1.0, 2.0), (2.0, 3.0))
    (one,) = distinct(Series("kl", points), Series("mean_kl", points, 2))
    assert one.name == "kl = mean_kl"
    assert len(distinct(Series("a", points), Series("b", ()))) == 2


def test_a_run_of_two_steps_with_tiny_figures_has_a_page(tmp_path: Path) -> None:
    a_run(tmp_path, num_steps=2)
    tiny = [{"step": 1, "mean_kl": 0.0, "mean_ratio": 1.0}, {"step": 2, "mean_kl": 3e-14, "mean_ratio": 1.0 + 2e-16}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in tiny))
    summary = json.loads((tmp_path / "summary.json").read_text()) | {"peak_memory_by_process": {"hub": 0}}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    assert ">1e-14</text>" in render(gather(tmp_path))


def test_answers_that_were_cut_off_are_marked(tmp_path: Path) -> None:
    a_run(tmp_path)
    for step, ended in ((0, False), (50, True)):
        values = evaluation(step, {"a": step > 0}, 0.5) | {"generation_params": {"max_tokens": 16}}
        values["samples"][0]["ended"] = ended
        (tmp_path / "evals" / f"step-{step}.json").write_text(json.dumps(values))
    text = text_of(render(gather(tmp_path)))
    assert "before: wrong (cut off at 16 tokens)" in text
    assert text.count("cut off") == 1


@pytest.mark.parametrize("value", [0.0, 1.0, -3.5, 1e-9, 1e12, 5e-324])
def test_a_chart_of_one_value_can_be_drawn(value: float) -> None:
    svg = draw(Chart("x", (Series("a", ((5.0, value),)), Series("b", ((5.0, value), (6.0, value)), is_noisy=True))))
    assert "nan" not in svg
    assert svg.endswith("</svg>")


@pytest.mark.parametrize(
    ("low", "high"), [(0.0, 1.0), (-0.003, 0.02), (5.0, 5.0), (0.0, 0.0), (1e-8, 3e-8), (0, 3e-14)]
)
def test_ticks_reach_around_what_is_drawn(low: float, high: float) -> None:
    found = ticks(low, high)
    assert found[0] <= low
    assert found[-1] >= high
    assert 2 <= len(found) <= 8


def test_ten_thousand_steps_make_no_heavy_page(tmp_path: Path) -> None:
    a_run(tmp_path, num_steps=10_000, is_summarized=False)
    facts = gather(tmp_path)
    assert all(draw(chart) for chart in charts_of(facts.history) if not chart.is_empty)
    assert len(render(facts)) < 300_000


def test_the_command_writes_beside_the_run_or_where_it_is_told(tmp_path: Path) -> None:
    a_run(tmp_path / "run")
    command = [sys.executable, "-m", "treadle", "report", str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout == "run/report.html\n"
    subprocess.run([*command, "--out", str(tmp_path / "a" / "b.html")], capture_output=True, check=True)
    assert (tmp_path / "a" / "b.html").read_text() == (tmp_path / "run" / "report.html").read_text()
    refused = subprocess.run([*command[:-1], str(tmp_path)], capture_output=True, text=True, check=False)
    assert refused.returncode == 2
    assert "is not the folder of a run" in refused.stderr
