"""`treadle sft` as a command: its settings, what it refuses, and what the page shows of its run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from treadle import cli
from treadle.config import load_run
from treadle.config.load import save_run
from treadle.config.schema import RunConfig
from treadle.config.values import explicit_keys
from treadle.dash.charts import CHARTS, DISTANCE_FROM_TEACHER, SFT_CHARTS, charts_of
from treadle.dash.run_folder import RunFolder, task_of
from treadle.dash.status import RunFacts, in_words, standing, tiles_of
from treadle.errors import ConfigError
from treadle.launch.preflight import model_of
from treadle.report.page import render_report
from treadle.report.summary import read_record
from treadle.sft.command import resume, start
from treadle.track.catalogue import METRICS
from treadle.track.files import JsonlTracker

OFFLINE = {"train.weight_bridge_mode": "offline"}


def refusal(capsys, *words: str) -> str:
    """What the command line says against it."""
    with pytest.raises(SystemExit) as ended:
        cli.main(["sft", *words])
    assert ended.value.code == 2
    return capsys.readouterr().err


def test_what_cannot_be_is_refused_at_once_with_its_remedy(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "-> --data FILE (JSONL, CSV or Parquet)" in refusal(capsys)
    message = refusal(
        capsys, "--data", "none.jsonl", "--train.objective", "dapo", "--train.epochs", "2", "--train.max-age", "1"
    )
    assert "there is no file or folder none.jsonl" in message
    assert "-> leave --train.objective out" in message
    assert "-> --epochs sets the passes over the rows" in message
    assert "--train.max-age is a setting of treadle run" in message
    message = refusal(capsys, "--data", "none.jsonl", "--train.model", "other", "--train.hub-url", "http://a:1")
    assert "-> --model other" in message
    assert "-> leave --train.hub-url out" in message
    assert "data and from are both given" in refusal(capsys, "--data", "a.jsonl", "--from", "runs/b")
    assert "is not the folder of a run" in refusal(capsys, "--from", str(tmp_path))
    assert "did you mean '--train.lr'" in refusal(capsys, "--lr", "1")
    assert "--sft.held-out" not in refusal(capsys, "--sft.held-out", "2", "--data", "none.jsonl")


def test_a_run_of_the_other_stage_is_not_resumed(tmp_path):
    save_run(load_run(None, {"steps": 3}), tmp_path / "config.json")
    with pytest.raises(ConfigError, match="no supervised run") as refused:
        resume(tmp_path, {})
    assert "run --resume" in refused.value.fix
    save_run(load_run(None, {"sft.data": "rows.jsonl", **OFFLINE}), tmp_path / "config.json")
    with pytest.raises(ConfigError, match="--resume cannot be with --epochs"):
        resume(tmp_path, {"sft.epochs": "2"})
    with pytest.raises(ConfigError, match="is a supervised run, which has no completions"):
        start(load_run(None, {"sft.from_run": tmp_path, "output": tmp_path}))


def test_settings_of_a_supervised_run_are_read_again(tmp_path: Path):
    config = load_run(None, {"steps": 7, "sft.data": "rows.jsonl", "sft.epochs": 2, **OFFLINE})
    save_run(config, tmp_path / "config.json")
    saved = json.loads((tmp_path / "config.json").read_text())
    assert not {"env", "hub", "engine", "openai"} & saved.keys()
    again = load_run(tmp_path / "config.json")
    assert again == config
    assert again.is_supervised
    assert again.task_name == "sft rows.jsonl"
    assert task_of(saved) == "sft rows.jsonl"


def test_treadle_run_reads_a_file_with_an_sft_table_and_does_not_use_it(tmp_path: Path):
    (tmp_path / "both.toml").write_text(
        'steps = 5\n[sft]\ndata = "rows.jsonl"\nheld-out = 0.1\n[env]\nname = "gsm8k"\n'
    )
    config = load_run(tmp_path / "both.toml")
    assert config.sft.held_out == 0.1
    assert not config.is_supervised
    save_run(config, tmp_path / "config.json")
    assert load_run(tmp_path / "config.json") == config.model_copy(update={"sft": RunConfig().sft})


def test_one_file_has_the_settings_of_both_stages(tmp_path: Path):
    file = tmp_path / "both.toml"
    file.write_text(
        'model = "b"\nsteps = 15\n[train]\nbatch_size = 128\nlr = 2e-5\nwarmup-steps = 3\n'
        '[sft]\ndata = "rows.jsonl"\nmodel = "a"\nsteps = 40\n[sft.train]\nbatch-size = 16\nlr = 3e-4\n'
    )
    run, sft = load_run(file), load_run(file, {"train.lr": "1e-4"}, is_supervised=True)
    assert (run.model, run.steps, run.train.batch_size, run.train.lr) == ("b", 15, 128, 2e-5)
    assert (sft.model, sft.steps, sft.train.batch_size) == ("a", 40, 16)
    assert (sft.train.lr, sft.train.warmup_steps) == (1e-4, 3), "flags come first, others stay"
    assert "steps" in explicit_keys(sft)
    file.write_text('[sft]\ndata = "rows.jsonl"\nstep = 40\n')
    with pytest.raises(ConfigError, match=r"'sft\.step'"):
        load_run(file)


def test_the_folder_of_a_run_stands_for_its_model(tmp_path: Path):
    run = tmp_path / "run"
    result = run / "checkpoints" / "final_model"
    result.mkdir(parents=True)
    save_run(load_run(None, {"sft.data": "rows.jsonl", **OFFLINE}), run / "config.json")
    (run / "request.json").write_text("{}")
    assert model_of(str(run)) == str(result)
    assert model_of("Qwen/Qwen3-0.6B") == "Qwen/Qwen3-0.6B"
    assert model_of(str(tmp_path)) == str(tmp_path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    config = load_run(None, {"steps": 2, "sft.data": "rows.jsonl", **OFFLINE})
    save_run(config, tmp_path / "config.json")
    tracker = JsonlTracker(tmp_path / "metrics.jsonl")
    tracker.log(0, {"eval_loss": 3.5})
    tracker.log(1, {"loss": 3.0, "perf/step_s": 1.0, "perf/trained_tok_s_wall_clock": 100.0, "time_s": 1.0})
    tracker.log(2, {"loss": 2.0, "eval_loss": 2.5, "perf/step_s": 1.0, "time_s": 2.0})
    tracker.close()
    return tmp_path


def test_the_page_shows_losses_and_no_rollouts(folder: Path):
    run = RunFolder(folder)
    assert charts_of(run) == SFT_CHARTS
    assert {name for chart in SFT_CHARTS for name in chart.names} <= set(METRICS)
    assert charts_of(None) == tuple(chart for chart in CHARTS if chart is not DISTANCE_FROM_TEACHER)
    now = RunFacts(explanation="", has_trainer=False, step=2, planned_steps=2, is_at_work=False, is_supervised=True)
    with run.metrics.columns() as columns:
        tiles = {tile.name: (tile.value, tile.note) for tile in tiles_of(columns, [], now, 0)}
    assert tiles["Loss"] == ("2.000", "3.000 at step 1")
    assert tiles["Held-out loss"] == ("2.500", "3.500 at step 0")
    assert not {"Reward (mean score)", "Held-out accuracy", "Generated tokens/s"} & tiles.keys()
    assert (standing(now), in_words(now)) == ("complete", ["all 2 steps are trained"])
    live = RunFacts(explanation="", has_trainer=False, step=1, planned_steps=2, is_supervised=True)
    assert in_words(live) == ["training step 2"]


def test_the_report_names_the_held_out_loss(folder: Path):
    page = render_report(read_record(folder))
    assert "The held-out loss was 3.500 and is 2.500." in page
    assert "Held-out accuracy was not measured" not in page
