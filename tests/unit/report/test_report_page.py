"""The report: what it shows of a run, what it never shows, and that text of a model stays text."""

from __future__ import annotations

import base64
import hashlib
import json
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from bench.page_history import write_run as write_long_run
from tests.written_run import evaluation, write_health, write_run
from treadle.config.load import save_run
from treadle.config.schema import RunConfig
from treadle.dash.export import embedded
from treadle.launch.folder import save_versions
from treadle.report.page import NUM_GROUPS, in_words, page_answers, render_report, report_of, settings_of
from treadle.report.summary import Outcome, read_record, save_summary, summarize

HOSTILE = "</pre><script>alert(1)</script><img src=x onerror=alert(2)> {{ 7 * 7 }}"


class Elements(HTMLParser):
    """Every element of a page, and the text of each script."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data: str) -> None:
        if self.cdata_elem == "script":
            self.scripts[-1] += data


def a_run(folder: Path, *, num_steps: int = 50, is_evaluated: bool = True, is_summarized: bool = True) -> RunConfig:
    config = write_run(folder, num_steps=num_steps, is_evaluated=is_evaluated)
    save_run(config, folder / "config.json")
    (folder / "request.json").write_text(json.dumps({"steps": 50, "train": {"lr": 1e-5}}))
    if is_summarized:
        history = read_record(folder).history
        outcome = Outcome(True, 300.0, 5_000_000_000, {"trainer": 3_000_000_000, "engine": 2_000_000_000})
        save_summary(summarize(config, folder, history, outcome), folder)
    return config


def shown(folder: Path) -> dict[str, Any]:
    """What the page gets."""
    return json.loads(Elements(render_report(read_record(folder))).scripts[0])


def words(folder: Path) -> str:
    return " ".join(in_words(read_record(folder)))


def test_a_finished_run_is_shown_with_result_charts_and_tables(tmp_path: Path) -> None:
    a_run(tmp_path)
    write_health(tmp_path, (7, "mean_kl 0.61 (usual 0.01 to 0.1)"))
    page = shown(tmp_path)
    report = page["report"]
    sentences = " ".join(report["words"])
    assert "was 1.6 % (0.6 to 3.6) before training and 73.0 % (72.0 to 75.0) at step 50, on 256 prompts" in sentences
    assert "The mean score of these answers was 0.008 and 0.365." in sentences
    tiles = {tile["name"]: tile["value"] for tile in page["now"]["tiles"]}
    assert tiles == {
        "Held-out accuracy": "1.6 % → 73.0 %", "Reward (mean score)": "0.850", "Generated tokens/s": "812",
        "Trained tokens/s": "412", "Step": "50 of 50", "Held-out mean score": "0.365", "Time": "5 min 00 s",
        "Seconds per step": "5.00", "Peak memory": "5.00 GB", "Health": "1 warning",
    }  # fmt: skip
    assert report["health"] == ["step 7: mean_kl 0.61 (usual 0.01 to 0.1)"]
    assert report["counts"] == [
        ["became right", 2],
        ["became wrong", 0],
        ["right both times", 1],
        ["wrong both times", 2],
    ]
    assert report["peak_memory"] == "5.00 GB"
    assert [name for name, _, _ in report["memory"]] == ["trainer", "engine"]
    series = page["series"]
    assert (len(series["steps"]), series["values"]["perf/generated_tok_s_wall_clock"][0]) == (50, 812.3)
    assert [point["accuracy"] for point in series["held_out"]] == [0.016, 0.73]
    assert page["now"]["standing"] == "complete"


def test_the_sampling_note_is_left_out_with_several_environments(tmp_path: Path) -> None:
    config = a_run(tmp_path)
    assert "held-out answers are greedy" in words(tmp_path)
    tables = [{**config.env.model_dump(), "name": name, "wandb_name": name} for name in ("arithmetic", "echo")]
    for table in tables:
        table["data_dir_to_save_evals"] = folder = tmp_path / "evals" / table["name"]
        shutil.copytree(tmp_path / "evals", folder, ignore=lambda _, names: {"arithmetic", "echo"} & set(names))
    save_run(RunConfig.model_validate({**config.model_dump(), "envs": tables}), tmp_path / "config.json")
    assert "73.0 %" in words(tmp_path)
    assert "held-out answers are" not in words(tmp_path)


def test_a_page_loads_nothing_and_runs_only_its_own_scripts(tmp_path: Path) -> None:
    a_run(tmp_path)
    page = render_report(read_record(tmp_path))
    elements = Elements(page)
    assert not {tag for tag, _ in elements.found} & {"img", "link", "iframe", "object", "embed"}
    names = {name for _, attrs in elements.found for name in attrs}
    assert not {name for name in names if name.startswith("on")} | names & {"src", "action", "style"}
    policy = next(attrs["content"] for _, attrs in elements.found if "http-equiv" in attrs)
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in elements.scripts[1:]]
    assert f"default-src 'none'; script-src 'sha256-{hashes[0]}' 'sha256-{hashes[1]}'; " in policy
    for call in ("XMLHttpRequest", "import(", "innerHTML", "document.write", "eval(", "@import", "url("):
        assert call not in page


def test_what_a_model_wrote_is_text_and_nothing_else(tmp_path: Path) -> None:
    a_run(tmp_path)
    plain = Elements(render_report(read_record(tmp_path))).found
    for step in (0, 50):
        values = evaluation(step, {HOSTILE: step > 0}, 0.5)
        values["samples"][0] |= {"completion": HOSTILE, "gold": HOSTILE}
        (tmp_path / "evals" / f"step-{step}.json").write_text(json.dumps(values))
    write_health(tmp_path, (3, HOSTILE))
    config = json.loads((tmp_path / "config.json").read_text())
    config["env"]["system_prompt"] = HOSTILE
    (tmp_path / "config.json").write_text(json.dumps(config))
    page = render_report(read_record(tmp_path))
    assert Elements(page).found == plain
    assert "alert(1)" in page
    assert json.dumps(shown(tmp_path)).count("alert(1)") >= 5
    assert not set(embedded(HOSTILE + "\u2028\u2029")) & set("<>&\u2028\u2029")
    assert json.loads(embedded(HOSTILE)) == HOSTILE


def test_keys_are_not_shown(tmp_path: Path) -> None:
    a_run(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["openai"]["api_key"] = "sk-very-secret"
    config["engine"]["vllm_args"] = "--api-key sk-very-secret --seed 3"
    config["env"]["hub_url"] = "http://hub:8000/t/sk-very-secret"
    (tmp_path / "config.json").write_text(json.dumps(config))
    page = render_report(read_record(tmp_path))
    assert "sk-very-secret" not in page
    assert "--api-key (not shown) --seed 3" in page


def test_settings_of_the_user_are_marked_among_those_that_differ(tmp_path: Path) -> None:
    config = a_run(tmp_path)
    settings = {one.key: one for one in settings_of(config, frozenset({"steps"}))}
    assert settings["steps"].value != settings["steps"].default
    assert settings["steps"].is_requested
    assert settings["train.metrics_file"].value != settings["train.metrics_file"].default
    assert not settings["train.metrics_file"].is_requested
    assert settings["env.temperature"].value == settings["env.temperature"].default


def test_an_unfinished_run_has_a_page_too(tmp_path: Path) -> None:
    a_run(tmp_path, num_steps=12, is_evaluated=False, is_summarized=False)
    page = shown(tmp_path)
    assert (page["now"]["standing"], page["now"]["words"]) == ("unfinished", ["not complete: 12 of 50 steps"])
    assert "it has not been measured since" in words(tmp_path)
    assert page["report"]["examples"] == []


def test_a_run_that_has_written_nothing_yet_has_a_page(tmp_path: Path) -> None:
    save_run(RunConfig(), tmp_path / "config.json")
    page = shown(tmp_path)
    assert page["series"]["num_steps"] == 0
    assert "Held-out accuracy was not measured." in page["report"]["words"]


def test_intervals_that_overlap_are_called_what_they_are(tmp_path: Path) -> None:
    a_run(tmp_path)
    (tmp_path / "evals" / "step-50.json").write_text(json.dumps(evaluation(50, {"a": True}, 0.02)))
    assert "The intervals overlap: the difference may be chance." in in_words(read_record(tmp_path))


def test_versions_are_shown_where_they_were_recorded(tmp_path: Path) -> None:
    a_run(tmp_path)
    assert ("torch", "not recorded") in report_of(read_record(tmp_path))["versions"]
    save_versions(tmp_path)
    (tmp_path / "logs").mkdir()
    line = "2026-01-02T03:04:05.678 INFO    engine loaded engine=vllm version=0.32.0 model=/m device=cpu seconds=9\n"
    (tmp_path / "logs" / "engine.log").write_text(line * 2)
    record = read_record(tmp_path)
    assert record.engines == ("vllm 0.32.0",)
    assert record.versions["python"] == ".".join(map(str, sys.version_info[:3]))
    assert ("torch", "not recorded") not in report_of(record)["versions"]


def test_late_waits_in_any_log_are_alarms(tmp_path: Path) -> None:
    a_run(tmp_path)
    (tmp_path / "logs").mkdir()
    line = (
        '2026-01-02T03:04:05.678 ERROR   watchdog late for="the engine to adopt version 17" seconds=181 turn_of=engine'
    )
    (tmp_path / "logs" / "trainer.log").write_text(f"Stack:\n{line}\n")
    record = read_record(tmp_path)
    assert len(record.alarms) == 1
    assert 'trainer: late for="the engine to adopt version 17"' in report_of(record)["alarms"][0]


def test_a_run_of_two_steps_with_tiny_figures_has_a_page(tmp_path: Path) -> None:
    a_run(tmp_path, num_steps=2)
    tiny = [{"step": 1, "mean_kl": 0.0, "mean_ratio": 1.0}, {"step": 2, "mean_kl": 3e-14, "mean_ratio": 1.0 + 2e-16}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in tiny))
    summary = json.loads((tmp_path / "summary.json").read_text()) | {"peak_memory_by_process": {"hub": 0}}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    assert shown(tmp_path)["series"]["values"]["mean_kl"] == [0.0, 3e-14]


def test_answers_that_were_cut_off_are_marked(tmp_path: Path) -> None:
    a_run(tmp_path)
    for step, ended in ((0, False), (50, True)):
        values = evaluation(step, {"a": step > 0}, 0.5) | {"generation_params": {"max_tokens": 16}}
        values["samples"][0]["ended"] = ended
        (tmp_path / "evals" / f"step-{step}.json").write_text(json.dumps(values))
    report = report_of(read_record(tmp_path))
    assert report["cut_off"] == {"before": "cut off at 16 tokens", "after": "cut off at 16 tokens"}
    assert [(one["before_ended"], one["after_ended"]) for one in report["examples"]] == [(False, True)]


def test_ten_thousand_steps_make_no_heavy_page(tmp_path: Path) -> None:
    a_run(tmp_path, num_steps=10_000, is_summarized=False)
    assert len(render_report(read_record(tmp_path))) < 300_000


def test_the_newest_trained_groups_are_in_the_report_up_to_a_limit(tmp_path: Path) -> None:
    write_long_run(tmp_path, num_steps=20, num_groups=100)
    page = page_answers(read_record(tmp_path))
    assert page["tabs"] == ["overview", "rollouts"]
    ids = [group["id"] for group in page["groups"]]
    assert (len(ids), ids) == (NUM_GROUPS, sorted(ids, reverse=True))
    first = page["views"][str(ids[0])]
    assert "".join(first.rollouts[0].pieces).startswith("What is ")
    assert first.has_record
    assert page["groups"][0]["scores"] == [rollout.score for rollout in first.rollouts]
    whole = render_report(read_record(tmp_path))
    assert len(whole) < 700_000


def test_a_damaged_queue_leaves_out_the_groups_and_nothing_else(tmp_path: Path) -> None:
    a_run(tmp_path)
    (tmp_path / "hub.sqlite").write_bytes(b"no database")
    page = page_answers(read_record(tmp_path))
    assert (page["tabs"], page["groups"], page["series"].num_steps) == (["overview"], [], 50)


def test_the_command_writes_into_the_run_folder_or_to_out(tmp_path: Path) -> None:
    a_run(tmp_path / "run")
    command = [sys.executable, "-m", "treadle", "report", str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout == "run/report.html\n"
    subprocess.run([*command, "--out", str(tmp_path / "a" / "b.html")], capture_output=True, check=True)
    assert (tmp_path / "a" / "b.html").read_text() == (tmp_path / "run" / "report.html").read_text()
    refused = subprocess.run([*command[:-1], str(tmp_path)], capture_output=True, text=True, check=False)
    assert refused.returncode == 2
    assert "is not the folder of a run" in refused.stderr
