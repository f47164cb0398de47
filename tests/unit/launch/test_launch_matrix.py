"""`treadle matrix`: the table of the modes from the metrics of real runs, and what may be compared and resumed.

tests/data/matrix/MODE.jsonl are metrics of real runs: a tiny model on the echo task, five steps, on two cores.
"""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from tests.doc_pages import ROOT
from tests.written_run import evaluation
from treadle import cli
from treadle.config import RunConfig, load_run, save_run
from treadle.errors import ConfigError
from treadle.launch import STOPPED_BY_USER
from treadle.launch.folder import save_request
from treadle.launch.matrix import (
    MATRIX_FILE,
    check_settings,
    flags_of,
    load_settings,
    obstacle,
    parse_modes,
    refusal,
    refuse_other_settings,
    resume_matrix,
    settings_of,
    start_matrix,
    with_settled_paths,
)
from treadle.launch.matrix_table import Matrix, ModeRow, draw_plot, one_sentence, render_page, row_of, text_of, verdict
from treadle.report.summary import Outcome, RunRecord, read_record, save_summary, summarize
from treadle.support import MATRIX_MODES as MODES

RECORDED = ROOT / "tests" / "data" / "matrix"
STEPS = 5
HOSTILE = "</td><script>alert(1)</script><img src=http://x/y> {{ 7 * 7 }}"

Changes = dict[int, dict[str, Any]]


def lay_out(folder: Path, mode: str, *, answered: int = STEPS, changes: Changes | None = None) -> RunRecord:
    """A finished run with recorded metrics; `changes` are laid over its steps."""
    (folder / "evals").mkdir(parents=True)
    steps = [json.loads(line) for line in (RECORDED / f"{mode}.jsonl").read_text().splitlines()]
    lines = [json.dumps(step | (changes or {}).get(step["step"], {})) for step in steps]
    (folder / "metrics.jsonl").write_text("".join(line + "\n" for line in lines))
    last = evaluation(STEPS, {"a": True}, 0.5) | {"policy_version": answered}
    (folder / "evals" / "last.json").write_text(json.dumps(last))
    flags = {f"train.{key}": value for key, value in MODES[mode].items()}
    own = {"train.metrics_file": folder / "metrics.jsonl", "env.data_dir_to_save_evals": folder / "evals"}
    config = load_run(None, {"steps": STEPS, "train.steps": STEPS, **flags, **own})
    save_run(config, folder / "config.json")
    (folder / "logs").mkdir()
    (folder / "logs" / "engine.log").write_text("2026-01-02 INFO engine loaded engine=transformers version=5.0 x=1\n")
    finish(folder, config)
    return read_record(folder)


def finish(folder: Path, config: RunConfig, *, is_complete: bool = True, last_words: str = "") -> None:
    outcome = Outcome(is_complete, 20.0, 1_500_000_000, last_words=last_words)
    save_summary(summarize(config, folder, read_record(folder).history, outcome), folder)


def row(folder: Path, mode: str = "none", **how: Any) -> ModeRow:
    return row_of(mode, flags_of(mode), lay_out(folder, mode, **how), "run")


def matrix_of(*rows: ModeRow) -> Matrix:
    return Matrix("20260102-030405-matrix-echo", "echo", "tiny", 0, STEPS, "2 cores", "2026-01-02", rows)


def test_a_row_holds_what_a_mode_cost(tmp_path: Path) -> None:
    steps = [json.loads(line) for line in (RECORDED / "none.jsonl").read_text().splitlines()]
    found = row(tmp_path)
    assert found.result == "passed"
    assert found.num_publishes == 2, "after steps 3 and 5: restarts are published every third step"
    later = steps[1:]
    expected = {
        "step_s": sum(step["perf/step_s"] for step in later) / 4,
        "publish_s": sum(step["perf/weight_sync_s"] for step in steps) / 2,
        "sent_mb": (steps[2]["sync/bytes"] + steps[4]["sync/bytes"]) / 2 / 1e6,
        "memory_gb": 1.5,
        "device_gb": None,
        "tokens_s": sum(step["batch/tokens_per_step"] for step in later) / sum(step["perf/step_s"] for step in later),
        "canary": steps[4]["sync/canary_mean_abs_diff"],
        "first_reward": steps[0]["reward"],
        "last_reward": steps[4]["reward"],
    }
    assert {key: found.figures[key] for key in expected} == pytest.approx(expected, nan_ok=False)
    step = steps[3]  # the only one that trained tokens of the newest version
    assert found.figures["sampled"] == step["sampling/sampling_logp_difference/mean"] < 1e-6
    assert found.rewards == tuple(step["reward"] for step in steps)


def test_the_table_has_a_line_for_every_mode_and_says_passed_or_failed(tmp_path: Path) -> None:
    rows = (
        row(tmp_path / "none"),
        row(tmp_path / "single", "single_copy", answered=4),
        ModeRow("broadcast_nccl", "not possible", obstacle("broadcast_nccl", 0)),
        ModeRow("delta", "not run"),
    )
    text = text_of(matrix_of(*rows))
    header, units, *lines = text.splitlines()[3:9]
    assert header.split() == ["mode", "result", "step", "publish", "sent", "memory", "tokens", "canary", "sampled",
                              "reward", "reward"]  # fmt: skip
    assert units.split() == ["s", "s", "MB", "GB", "/s", "nats", "nats", "first", "last"]
    assert [line.split("  ")[0] for line in lines] == ["none", "single_copy", "broadcast_nccl", "delta"]
    assert max(map(len, lines)) <= 110
    assert re.search(r"^none: passed: 5 of 5 steps were taken; the engine answered the last evaluation as version 5; "
                     r"logprobs of trainer and engine differ by \S+ nats after the last publish; rewards are finite$",
                     text, re.MULTILINE)  # fmt: skip
    assert "single_copy: failed: the engine answered the last evaluation as version 4, not 5\n" in text
    assert "broadcast_nccl: not possible: NCCL needs a GPU for the trainer and another for the engine, and this " \
           "machine has none\n" in text  # fmt: skip
    assert "\ndelta: not run\n" in text


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({5: {"sync/canary_mean_abs_diff": None}}, "parity was not measured at the last publish"),
        ({2: {"reward": None}}, "the reward of step 2 is not finite"),
    ],
)
def test_a_run_without_proof_has_failed(tmp_path: Path, changes: Changes, reason: str) -> None:
    found = row(tmp_path, changes=changes)
    assert verdict(found) == f"failed: {reason}"


def test_a_run_that_was_ended_says_why_in_one_sentence(tmp_path: Path) -> None:
    facts = lay_out(tmp_path, "none")
    finish(tmp_path, facts.config, is_complete=False)
    assert verdict(row_of("none", "", read_record(tmp_path), "run")) == "stopped: after step 5 of 5"
    error = (
        "trainer died (exit code 1); the end of its log:\n  | 12:00 INFO step\n  | treadle: after the publish of "
        "version 3, 1 of 272 weights differ\n  |   -> restart the engine\n  -> the whole log is /runs/logs/trainer.log"
    )
    finish(tmp_path, facts.config, is_complete=False, last_words=error)
    found = row_of("none", "", read_record(tmp_path), "run")
    assert verdict(found) == (
        "failed: trainer died (exit code 1): after the publish of version 3, 1 of 272 weights differ"
    )
    assert one_sentence("port 8000 is in use\n  -> pass --hub.port") == "port 8000 is in use"


def test_modes_are_named_as_users_know_them() -> None:
    assert parse_modes("lora_only, reload") == ("lora_only", "reload")
    assert parse_modes("single-copy,shared_vllm") == ("single_copy", "broadcast")
    assert parse_modes("all") == tuple(MODES)
    with pytest.raises(ConfigError, match="did you mean 'lora_only'"):
        parse_modes("lora_onyl")
    with pytest.raises(ConfigError, match="without an engine"):
        parse_modes("offline")


def test_every_mode_gets_the_same_settings_but_its_own(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text('steps = 3\n[train]\nweight_bridge_mode = "lora_only"\nlr = 1e-4\n')
    shared = with_settled_paths(load_settings(tmp_path / "mine.toml", {"env.group_size": "4"}))
    runs = {mode: settings_of(shared, mode, tmp_path) for mode in MODES}
    assert {mode for mode, run in runs.items() if run.train.lora} == {"lora_only", "lora_single_copy", "lora_restart"}
    assert len({(r.train.weight_bridge_mode, r.train.single_copy, r.train.use_shared_memory, r.train.broadcast_by)
                for r in runs.values()}) == len(MODES)  # fmt: skip
    assert all((r.steps, r.seed, r.env.group_size, r.train.lr) == (3, 0, 4, 1e-4) for r in runs.values())
    assert runs["none"].output == tmp_path / "none"


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ({"train.weight_bridge_mode": "reload"}, "--train.weight-bridge-mode chooses one mode"),
        ({"train.save_path": "mine"}, "--train.save-path would be the same for all modes"),
        ({"env.group_size": "3", "train.batch_size": "8"}, "no multiple of"),
        ({"env.name": "no_such_task"}, "no_such_task"),
    ],
)
def test_settings_that_no_mode_can_run_with_are_refused_first(flags: dict[str, str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        check_settings(load_settings(None, flags), tuple(MODES))


def test_settings_that_one_mode_cannot_run_with_are_its_reason() -> None:
    adapters = load_settings(None, {"train.lora": "true"})
    check_settings(adapters, tuple(MODES))
    assert "single_copy cannot be with lora" in str(refusal(adapters, "single_copy"))
    assert refusal(adapters, "reload") is None
    with pytest.raises(ConfigError, match="single_copy cannot be with lora"):
        check_settings(adapters, ("single_copy",))


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    """A matrix of two modes that have both finished."""
    folder = tmp_path / "20260102-030405-matrix-arithmetic"
    for mode in ("none", "single_copy"):
        lay_out(folder / mode / "20260102-030405-arithmetic", mode)
    save_request(with_settled_paths(load_settings(None, {"steps": str(STEPS)})), folder)
    rows = [{"mode": mode, "result": "passed", "reason": ""} for mode in ("none", "single_copy")]
    (folder / MATRIX_FILE).write_text(json.dumps({"modes": ["none", "single_copy"], "rows": rows}))
    return folder


def test_a_finished_matrix_is_written_again_without_running(finished: Path, capsys: Any) -> None:
    again = load_settings(None, {"steps": str(STEPS)})
    assert resume_matrix(finished, again, ("none", "single_copy"), plain=True) == 0
    output = capsys.readouterr().out
    assert "mode 1 of 2, none: passed: 5 of 5 steps" in output
    saved = json.loads((finished / MATRIX_FILE).read_text())
    assert [(row["mode"], row["result"]) for row in saved["rows"]] == [("none", "passed"), ("single_copy", "passed")]
    assert saved["rows"][1]["figures"]["sent_mb"] == 0
    assert (finished / "matrix.txt").read_text() in output
    assert (finished / "matrix.png").read_bytes().startswith(b"\x89PNG")
    page = (finished / "matrix.html").read_text()
    for link in re.findall(r'href="([^"]+)"', page):
        assert (finished / link).is_file()


@pytest.mark.parametrize(
    ("flags", "modes", "problem"),
    [
        ({"steps": "9"}, None, "was started with steps 5; --resume cannot change it to 9"),
        ({"train.lr": "1e-3"}, None, "was started with train.lr"),
        ({}, ("none",), "has the modes none,single_copy, and --modes says none"),
    ],
)
def test_a_resumed_matrix_keeps_its_settings(
    finished: Path, flags: dict[str, str], modes: tuple[str, ...] | None, problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        resume_matrix(finished, load_settings(None, flags), modes, plain=True)


def test_a_refused_change_of_a_secret_does_not_show_it() -> None:
    given, begun = (load_settings(None, {"openai.api_key": key}) for key in ("sk-now", "sk-then"))
    with pytest.raises(ConfigError, match=r"openai\.api_key") as refused:
        refuse_other_settings(given, begun)
    assert "sk-" not in str(refused.value)


def test_the_home_folder_in_output_is_understood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("treadle.launch.matrix._Runner.run", lambda *_: 0)
    assert start_matrix(load_settings(None, {"output": "~/runs"}), ("none",), plain=True) == 0
    assert len(list((tmp_path / "home" / "runs").iterdir())) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["home"]


def test_a_folder_that_is_no_matrix_cannot_be_resumed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not the folder of a matrix"):
        resume_matrix(tmp_path, load_settings(None, {}), None, plain=True)
    (tmp_path / MATRIX_FILE).write_text('{"modes": ["none"]')
    with pytest.raises(ConfigError, match="cannot be read"):
        resume_matrix(tmp_path, load_settings(None, {}), None, plain=True)


class Tags(HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def test_the_page_loads_nothing_and_shows_errors_as_text(tmp_path: Path) -> None:
    matrix = matrix_of(row(tmp_path / "none"), ModeRow("reload", "failed", HOSTILE))
    draw_plot(matrix, tmp_path / "matrix.png")
    page = render_page(matrix, (tmp_path / "matrix.png").read_bytes())
    tags = Tags(page).found
    assert not {tag for tag, _ in tags} & {"script", "link", "iframe", "object", "form"}
    assert [attrs["src"][:22] for tag, attrs in tags if tag == "img"] == ["data:image/png;base64,"]
    assert [attrs["href"] for tag, attrs in tags if tag == "a"] == ["run/report.html"]
    assert "{{ 7 * 7 }}" in page
    assert "default-src 'none'" in page


def test_a_resumed_matrix_gets_the_secret_of_one_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = {"env": "arithmetic,echo", "envs.1.args": '{"api_key": "sk-1"}', "output": str(tmp_path / "runs")}
    monkeypatch.setattr("treadle.launch.matrix.start", lambda config, **_: save_life(config) or STOPPED_BY_USER)
    assert start_matrix(load_settings(None, flags), ("reload",), plain=True) == STOPPED_BY_USER
    (matrix,) = (tmp_path / "runs").iterdir()
    given: list[dict[str, Any]] = []
    monkeypatch.setattr("treadle.launch.matrix.resume", lambda _, secrets, **__: given.append(secrets) or 0)
    resume = ["matrix", "--resume", str(matrix), "--plain"]
    with pytest.raises(SystemExit):
        cli.main(resume)
    assert "give --envs.1.args again" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main([*resume, "--envs.1.args", '{"api_key": "sk-1"}'])
    (run,) = (matrix / "reload").iterdir()
    assert load_run(run / "config.json", given[0]).envs[1].args == {"api_key": "sk-1"}


def save_life(config: RunConfig) -> None:
    """What is there of a run that was stopped at once."""
    folder = config.output / "20260102-030405-arithmetic+echo"
    folder.mkdir(parents=True)
    save_run(config, folder / "config.json")
