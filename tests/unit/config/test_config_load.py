"""Load TOML files and flags into one frozen value; errors name the problem and the fix."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from treadle.config import RunConfig, load_run, save_run
from treadle.config.atropos import ALIASES
from treadle.config.files import SECTIONS
from treadle.config.flags import FlagParser, add_flags, given
from treadle.config.load import dotted_keys, load_process
from treadle.config.schema import TrainConfig
from treadle.errors import ConfigError


def test_flags_win_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("steps = 7\n[train]\nlr = 1e-4\nclip_low = 0.1\n")
    run = load_run(file, {"train.lr": "3e-5"})
    assert (run.steps, run.train.lr, run.train.clip_low) == (7, 3e-5, 0.1)


def test_a_saved_run_reads_back_to_the_same_value(tmp_path: Path) -> None:
    run = load_run(None, {"train.clip_eps": "0.3", "engine.weights_file": "/tmp/w", "output": "elsewhere"})
    save_run(run, tmp_path / "config.json")
    assert load_run(tmp_path / "config.json") == run


def test_the_configuration_is_frozen() -> None:
    with pytest.raises(ValidationError):
        RunConfig().steps = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("overrides", "says", "fix"),
    [
        ({"env.group_siez": "4"}, "unknown key 'env.group_siez'", "did you mean 'group_size'?"),
        ({"hub.port": "70000"}, "'hub.port' is '70000'", "correct --hub.port"),
        ({"train.lr": "fast"}, "'train.lr' is 'fast'", "correct --train.lr"),
        ({"train.learning_rat": "1"}, "unknown key 'train.learning_rat'", "did you mean 'learning_rate'?"),
        ({"group_size": "4"}, "unknown key 'group_size'", "did you mean 'env.group_size'?"),
        ({"env.port": "1"}, "unknown key 'env.port'", "did you mean 'hub.port' or 'engine.port' or 'router.port'?"),
        ({"env.learning_rat": "1"}, "unknown key 'env.learning_rat'", "did you mean 'train.learning_rate'?"),
        ({"train.qqq": "1"}, "unknown key 'train.qqq'", "treadle run --help-all lists all settings"),
    ],
)
def test_what_is_wrong_is_named_with_its_remedy(overrides: dict[str, str], says: str, fix: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_run(None, overrides)
    assert says in caught.value.message
    assert caught.value.fix == fix


@pytest.mark.parametrize(
    ("args", "says"), [("low=2", "--env.args is not JSON: low=2"), ("[2]", "--env.args is no JSON object: [2]")]
)
def test_args_that_are_no_json_object_are_refused_with_an_example(args: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_run(None, {"env.args": args})
    assert says in str(caught.value)
    assert str(caught.value).endswith("""--env.args '{"low": 2}'""")


SPELT_OTHERWISE = {
    "run.toml": """model-name = "m"\ntraining_steps = 3\n[train]\nlearning_rate = 1e-3\nbatch-size = 16\nhub_url = "h"
metrics_file = "None"\nbenchmark = true\n[env]\nmax_batches_offpolicy = 2\ntokenizer_name = "t"\n""",
    "run.yaml": """model-name: m\ntraining_steps: 3\ntrain: {learning_rate: 1e-3, batch-size: 16, hub_url: h,
  metrics_file: None, benchmark: true}\nenv:\n  max_batches_offpolicy: 2\n  tokenizer_name: t\n""",
    "run.json": """{"model-name": "m", "training_steps": 3, "train": {"learning_rate": 1e-3, "batch-size": 16,
  "hub_url": "h", "metrics_file": "None", "benchmark": true}, "env": {"max_batches_offpolicy": 2,
  "tokenizer_name": "t"}}""",
}


@pytest.mark.parametrize("name", SPELT_OTHERWISE)
def test_a_file_takes_every_spelling_that_flags_take(name: str, tmp_path: Path, capsys) -> None:
    (tmp_path / name).write_text(SPELT_OTHERWISE[name])
    run = load_run(tmp_path / name, {"train.lr": "2e-3"})
    assert (run.model, run.steps, run.train.lr, run.train.batch_size) == ("m", 3, 2e-3, 16)
    assert (run.train.hub_url, run.train.metrics_file, run.env.max_age) == ("h", None, 2)
    warnings = capsys.readouterr().err
    assert f"{name}: 'train.benchmark' has no effect: every step is timed" in warnings
    assert f"{name}: 'env.tokenizer_name' has no effect: " in warnings


def test_two_spellings_of_one_setting_are_refused_in_every_file(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("[train]\nlr = 1e-3\nlearning_rate = 1e-3\n")
    with pytest.raises(ConfigError, match=r"'train\.learning_rate' is another name of a setting"):
        load_run(tmp_path / "run.toml")


def test_a_file_that_is_not_there_or_not_toml(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the configuration"):
        load_run(tmp_path / "nowhere.toml")
    (tmp_path / "broken.toml").write_text("steps = = 3\n")
    with pytest.raises(ConfigError, match="cannot be parsed"):
        load_run(tmp_path / "broken.toml")


def test_underscores_dashes_and_old_spellings_are_one_flag() -> None:
    parser = FlagParser(prog="treadle train")
    add_flags(parser, TrainConfig, prefix="train.")
    for spelling in ("--learning-rate", "--learning_rate", "--lr"):
        assert given(parser.parse_args([spelling, "1e-5"])) == {"train.lr": "1e-5"}
    assert given(parser.parse_args(["--model-name=a_b/c_d"])) == {"train.model": "a_b/c_d"}


def test_none_means_empty() -> None:
    parser = FlagParser(prog="treadle train")
    add_flags(parser, TrainConfig, prefix="train.")
    assert given(parser.parse_args(["--metrics-file", "None"])) == {"train.metrics_file": None}


def test_settings_of_several_processes_can_be_stated_once_for_all(tmp_path: Path) -> None:
    file = tmp_path / "shared.toml"
    file.write_text(
        'model = "M"\nseed = 3\nmax_age = 2\natropos_url = "http://hub"\nengine_url = "http://engine"\n'
        "[train]\nseed = 4\n"
    )
    run = load_process(file, {"openai.model": "tokenizer"}, "train")
    assert (run.engine.model, run.train.model, run.openai.model) == ("M", "M", "tokenizer")
    assert (run.env.seed, run.train.seed, run.env.max_age, run.train.max_age, run.hub.max_age) == (3, 4, 2, 2, None)
    assert {run.engine.hub_url, run.env.hub_url, run.train.hub_url} == {"http://hub"}
    file.write_text('max_age = 2\n[env]\npace = "stream"\n')
    stream = load_process(file, {}, "train")
    assert (stream.env.max_age, stream.train.max_age) == (2, 0), "a trainer does not wait for a stream"
    assert (run.train.engine_url, run.openai.base_url) == (("http://engine",), ("http://engine",))


def test_every_atropos_spelling_names_a_setting() -> None:
    fields = {name for kind in (RunConfig, *SECTIONS.values()) for name in kind.model_fields}
    assert fields >= set(ALIASES)
    assert load_run(None, dotted_keys({"env": {"rollout_server_url": "http://hub"}})).env.hub_url == "http://hub"
