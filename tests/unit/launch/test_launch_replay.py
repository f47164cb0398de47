"""A run's config.json starts the same run again in a new folder; --resume alone finds the newest run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import save_file
from transformers import LlamaConfig

from treadle import cli
from treadle.config import RunConfig, load_run, save_run
from treadle.errors import ConfigError
from treadle.launch.folder import check_checkpoints, newest_run
from treadle.launch.job import RunSession, start_run
from treadle.launch.machine import held_ports, port_of
from treadle.launch.process_plan import RunPlan

DERIVED = (  # what holds for one run only, by section
    ("hub", "database"), ("hub", "run_folder"), ("hub", "port"), ("engine", "port"), ("engine", "hub_url"),
    ("engine", "weights_file"), ("engine", "model"), ("openai", "base_url"), ("env", "hub_url"),
    ("env", "state_dir"), ("env", "data_dir_to_save_evals"), ("env", "pace"), ("train", "save_path"),
    ("train", "metrics_file"), ("train", "hub_url"), ("train", "engine_url"), ("train", "steps"),
)  # fmt: skip


@pytest.fixture
def started_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[RunPlan]:
    """The plans of all runs that are started; their processes are not."""
    plans: list[RunPlan] = []
    monkeypatch.setattr(RunSession, "run", lambda session, **_: plans.append(session._plan))
    monkeypatch.setattr("treadle.launch.job.prepare_model", lambda _: str(tmp_path / "model"))
    monkeypatch.chdir(tmp_path)
    LlamaConfig(num_hidden_layers=2).save_pretrained(tmp_path / "model")
    save_file({}, tmp_path / "model" / "model.safetensors")
    return plans


def treadle(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main(list(words))
    return int(ended.value.code or 0)


def begin(**flags: object) -> Path:
    """A run's folder, as it is when the run was stopped at once."""
    flags = {"model": "model", "output": "runs", **flags}
    start_run(load_run(None, flags), plain=True)
    return newest_run(Path(str(flags["output"]))).resolve()


def files_of(folder: Path) -> dict[Path, bytes]:
    return {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_a_saved_configuration_starts_the_same_run_in_a_new_folder(started_runs: list[RunPlan]) -> None:
    first = begin(**{"steps": "7", "train.lr": "1e-3", "env.group_size": 4})
    before = files_of(first)
    assert treadle("run", "--config", str(first / "config.json"), "--steps", "1", "--plain") == 130
    again = started_runs[1].config
    assert (again.steps, again.train.steps, again.train.lr, again.env.group_size) == (1, 1, 1e-3, 4)
    assert started_runs[1].run_folder.parent == first.parent
    assert started_runs[1].run_folder != first
    assert not [end for end in '/"' if f"{first}{end}" in again.model_dump_json()], "nothing of it is in the old folder"
    assert not again.attached_urls
    assert files_of(first) == before


def test_what_a_run_derives_is_not_among_the_settings_it_saves(started_runs: list[RunPlan]) -> None:
    run = begin(**{"train.weight_bridge_mode": "lora_only", "train.seed": 3})
    saved = json.loads((run / "config.json").read_text())
    assert [f"{section}.{key}" for section, key in DERIVED if key in saved[section]] == []
    assert saved["train"]["seed"] == 3, "the user gave it"
    assert saved["max_age"] == started_runs[0].config.env.max_age, "it changes what is learned"
    assert "max_age" not in saved["env"], "it follows from that of the run"
    assert load_run(run / "config.json") == started_runs[0].config, "its processes and --resume read all of it"


def test_an_address_that_a_run_chose_does_not_bind_the_next_one(started_runs: list[RunPlan]) -> None:
    first = begin()
    with held_ports({"hub": ("127.0.0.1", started_runs[0].config.hub.port)}) as busy:  # by another run
        assert treadle("run", "--config", str(first / "config.json"), "--plain") == 130
        assert started_runs[1].config.hub.port != port_of(busy["hub"])
    assert started_runs[1].config.env.hub_url != started_runs[0].config.env.hub_url


def test_a_chosen_port_is_a_setting_and_stays_one(started_runs: list[RunPlan]) -> None:
    with held_ports({"hub": ("127.0.0.1", 0)}) as free:
        port = port_of(free["hub"])
    first = begin(**{"hub.port": port})
    assert treadle("run", "--config", str(first / "config.json"), "--plain") == 130
    assert started_runs[1].config.hub.port == port


def test_resume_keeps_what_the_run_derived(started_runs: list[RunPlan]) -> None:
    run = begin(steps=7)
    assert treadle("run", "--resume", str(run), "--steps", "9", "--plain") == 130
    assert started_runs[1].run_folder == run
    assert started_runs[1].config.train.save_path == started_runs[0].config.train.save_path == run / "checkpoints"
    assert started_runs[1].config.hub.database == run / "hub.sqlite"
    assert (started_runs[1].config.steps, started_runs[1].config.train.steps) == (9, 9)
    assert json.loads((run / "config.json").read_text())["steps"] == 9


def test_resume_without_a_folder_takes_the_newest_run_of_the_output(started_runs: list[RunPlan]) -> None:
    begin(output="elsewhere/runs")
    newest = begin(output="elsewhere/runs")
    (newest.parent / "20990101-000000-matrix-arithmetic").mkdir()  # no run: it has no config.json
    begin()
    assert treadle("run", "--resume", "--plain", "--output", "elsewhere/runs") == 130
    assert started_runs[-1].run_folder == newest


def test_resume_without_a_run_says_where_it_looked(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    assert treadle("run", "--resume") == 2
    assert f"there is no run in {tmp_path / 'runs'}" in capsys.readouterr().err


def test_a_run_does_not_begin_where_all_its_steps_were_trained(
    started_runs: list[RunPlan], tmp_path: Path, capsys
) -> None:
    (tmp_path / "mine" / "adapter_step_5").mkdir(parents=True)
    first = begin(**{"steps": 9, "train.save_path": "mine"})
    assert f"continues from the checkpoint of step 5 in {Path('mine')}" in capsys.readouterr().out
    assert treadle("run", "--config", str(first / "config.json"), "--steps", "5", "--plain") == 2
    assert "mine holds a checkpoint of step 5, and this run has 5 steps" in capsys.readouterr().err
    assert len(started_runs) == 1
    with pytest.raises(ConfigError, match="nothing is left to train"):
        check_checkpoints(tmp_path / "mine", 4)


def test_settings_win_over_derived_values_that_were_saved_with_them(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    save_run(RunConfig(), file, ["hub.port", "train.save_path"])
    saved = json.loads(file.read_text())
    assert saved["derived"] == {"hub": {"port": 8000}, "train": {"save_path": "trained_model_checkpoints"}}
    saved["hub"]["port"] = 8111
    file.write_text(json.dumps(saved))
    assert load_run(file).hub.port == 8111
    assert "save_path" not in load_run(file, with_derived=False).train.model_fields_set
