"""Several environments in one configuration: [[env]] tables, and --env with weights."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from treadle import cli
from treadle.config import RunConfig, load_run, save_run
from treadle.config.env import EnvConfig, labels_of
from treadle.config.files import require_secrets, secret_variable
from treadle.config.load import load_process
from treadle.envs.main import serve_run
from treadle.errors import ConfigError

TABLES = """
[[env]]
name = "arithmetic"
task = "addition"
weight = 0.75

[[env]]
name = "arithmetic"
task = "comparison"
minimum = 0.25
group_size = 4
max_batches_offpolicy = 3
"""


def load(folder: Path, text: str = TABLES, **flags: object) -> RunConfig:
    file = folder / "run.toml"
    file.write_text(text)
    return load_run(file, {key.replace("__", "."): value for key, value in flags.items()})


def test_each_table_is_an_environment_with_its_own_settings(tmp_path: Path) -> None:
    first, second = load(tmp_path).environments
    assert (first.task, first.inference_weight, first.min_batch_allocation, first.group_size) == (
        "addition", 0.75, None, 8,
    )  # fmt: skip
    assert (second.task, second.inference_weight, second.min_batch_allocation, second.group_size, second.max_age) == (
        "comparison", 1.0, 0.25, 4, 3,
    )  # fmt: skip
    assert labels_of((first, second)) == ["arithmetic-addition", "arithmetic-comparison"]
    assert load(tmp_path, "[[env]]\ntask = 'addition'\n") == load(tmp_path, "[env]\ntask = 'addition'\n")


def test_a_yaml_list_is_several_environments_too(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("env:\n  - name: gsm8k\n    weight: 2\n  - name: echo\n")
    assert [(env.name, env.inference_weight) for env in load_run(file).environments] == [("gsm8k", 2.0), ("echo", 1.0)]


def test_a_flag_is_for_all_environments(tmp_path: Path) -> None:
    assert [env.group_size for env in load(tmp_path, env__group_size="2").environments] == [2, 2]


def test_the_command_line_names_environments_with_their_weights() -> None:
    several = load_run(None, {"env": "gsm8k:0.7,./my_env.py:mine:0.3,echo", "env.num_eval": "8"})
    assert [(env.name, env.inference_weight, env.num_eval) for env in several.environments] == [
        ("gsm8k", 0.7, 8), ("./my_env.py:mine", 0.3, 8), ("echo", 1.0, 8),
    ]  # fmt: skip
    assert load_run(None, {"env": "gsm8k"}) == load_run(None, {"env.name": "gsm8k"})


def test_the_command_line_chooses_among_the_tables_of_a_file(tmp_path: Path) -> None:
    first, second = load(tmp_path, env="arithmetic-comparison:3,echo").environments
    assert (first.task, first.group_size, first.inference_weight) == ("comparison", 4, 3.0)
    assert second.name == "echo"
    one = load(tmp_path, env="arithmetic-comparison")
    assert (one.env.task, one.envs) == ("comparison", ())


@pytest.mark.parametrize(
    ("text", "says", "fix"),
    [
        ("[[env]]\nname='echo'\n[[env]]\ngroup_siz=4\n",
         "unknown key 'env.group_siz' in [[env]] table 2 of", "did you mean 'group_size'?"),
        ("[[env]]\ngroup_size='x'\n[[env]]\nname='echo'\n",
         "'env.group_size' is 'x' in [[env]] table 1 of", "correct --env.group-size"),
        ("[[env]]\nname='echo'\nweight=0\n[[env]]\n",
         "echo: its weight is 0, and weights are greater than 0", "leave the environment out"),
        ("[[env]]\nname='echo'\n[[env]]\nname='echo'\n",
         "two environments of this run are called 'echo'", "wandb_name of its own"),
        ("[[env]]\nname='echo'\ngroup_size=3\n[[env]]\n", "echo: a step has 128 sequences", "change one of them"),
        ("[[env]]\nname='echo'\ngroup_size=1\n[[env]]\n", "echo: a group of one teaches nothing", "--env.group-size 8"),
        ("[[env]]\nname='echo'\npace='waves'\n[[env]]\n", "echo: pace waves fills whole batches", "--env.pace stream"),
        ("[[env]]\nname='echo'\nminimum=0.7\n[[env]]\nminimum=0.5\n",
         "the minimums of the environments are 1.2 of a batch together", "at most 1 together"),
        ("[[env]]\nname='echo'\nwandb_name='adding, easy'\n[[env]]\n",
         "called 'adding, easy', which --env reads as several names", "a wandb_name without a comma"),
        ("[[env]]\nname='echo'\nwandb_name='adding:2'\n[[env]]\n",
         "called 'adding:2', which --env reads as several names or as a weight", "a wandb_name without a comma"),
    ],
)  # fmt: skip
def test_what_is_wrong_in_a_table_is_named_with_its_remedy(tmp_path: Path, text: str, says: str, fix: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text).check_together()
    assert says in caught.value.message
    assert fix in caught.value.fix


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"env": "gsm8k,,echo"}, "names no environment"),
        ({"env": "gsm8k", "env.name": "echo"}, "are both given"),
        ({"env": "gsm8k,echo", "envs.2.task": "x"}, r"--envs\.2\.task is of no environment: this run has 2, counted"),
        ({"env": "gsm8k", "envs.0.task": "x"}, r"--envs\.0\.task is for one of several environments"),
    ],
)
def test_what_is_wrong_on_the_command_line_is_refused(flags: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load_run(None, flags)


def test_several_environments_are_saved_and_read_back(tmp_path: Path) -> None:
    run = load(tmp_path)
    save_run(run, tmp_path / "config.json", ["envs.1.seed", "hub.port"])
    assert load_run(tmp_path / "config.json").environments == run.environments
    again = load_run(tmp_path / "config.json", {"env.seed": 7}, with_derived=False)
    assert [env.seed for env in again.environments] == [7, 7]


def test_a_secret_of_one_environment_is_not_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = load(tmp_path, TABLES + 'args = {api_key = "sk-123456"}\n')
    save_run(run, tmp_path / "config.json")
    assert "sk-123456" not in (tmp_path / "config.json").read_text()
    with pytest.raises(ConfigError, match=r"--envs\.1\.args held a secret") as refused:
        require_secrets(load_run(tmp_path / "config.json").model_dump(mode="json"))
    assert refused.value.fix == "give --envs.1.args again"
    again = load_run(tmp_path / "config.json", {"envs.1.args": '{"api_key": "sk-2"}', "env.args": '{"low": 2}'})
    assert [env.args for env in again.environments] == [{"low": 2}, {"api_key": "sk-2"}]
    for variable, value in secret_variable(run.model_dump(mode="json"), "envs").items():
        monkeypatch.setenv(variable, value)
    assert load_run(tmp_path / "config.json").environments[1].args == {"api_key": "sk-123456"}


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, EnvConfig]]:
    """The actions of `treadle env`, with the settings of the environment; nothing is done."""
    found: list[tuple[str, EnvConfig]] = []
    monkeypatch.setattr("treadle.envs.run_action", lambda action, env, *_, **__: found.append((action, env)) or 0)
    return found


def test_an_environment_process_takes_its_table_by_name(tmp_path: Path, given: list[tuple[str, EnvConfig]]) -> None:
    (tmp_path / "run.toml").write_text(TABLES)
    with pytest.raises(SystemExit):
        cli.main(["env", "arithmetic-comparison", "validate", "--config", str(tmp_path / "run.toml")])
    assert [(action, env.task, env.group_size) for action, env in given] == [("validate", "comparison", 4)]


@pytest.mark.parametrize("name", ["/data/a,b/my_env.py", "verifiers:2"])
def test_the_name_of_an_environment_process_is_not_split(name: str, given: list[tuple[str, EnvConfig]]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["env", name, "serve"])
    assert [(env.name, env.inference_weight) for _, env in given] == [(name, 1.0)]


def test_processes_of_an_environment_divide_its_items_and_its_weight(tmp_path: Path) -> None:
    run = load_run(None, {"env": "gsm8k:0.6,echo:0.4", "envs.0.processes": "3", "env.num_eval": "8"})
    assert [(env.items, env.inference_weight, env.num_eval, env.processes) for env in run.environments] == [
        ("1/3", pytest.approx(0.2), 8, 1), ("2/3", pytest.approx(0.2), 0, 1), ("3/3", pytest.approx(0.2), 0, 1),
        ("", 0.4, 8, 1),
    ]  # fmt: skip
    assert labels_of(run.environments) == ["gsm8k", "gsm8k-2", "gsm8k-3", "echo"]
    save_run(run, tmp_path / "config.json")
    assert load_run(tmp_path / "config.json").environments == run.environments
    alone = load_run(None, {"env.task": "addition", "env.processes": 2})
    assert [(env.task, env.items) for env in alone.environments] == [("addition", "1/2"), ("addition", "2/2")]


@pytest.mark.parametrize("part", ["0/4", "5/4", "1", "-1/2", "1/2/3", "a/b"])
def test_a_part_that_is_none_is_refused(part: str) -> None:
    with pytest.raises(ConfigError, match="is not a part of the items"):
        load_run(None, {"env.items": part})


def test_one_process_takes_a_part_of_the_items_by_name(given: list[tuple[str, EnvConfig]]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["env", "gsm8k", "serve", "--env.items", "2/4", "--env.wandb-name", "gsm8k-2"])
    assert [env.items for _, env in given] == ["2/4"]


def test_one_process_is_not_taken_for_several(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("[env]\ntask = 'comparison'\nprocesses = 4\n")
    run = load_process(tmp_path / "run.toml", {}, "env")
    assert (run.envs, run.env.task) == ((), "comparison")
    with pytest.raises(ConfigError, match="this command is one process") as refused:
        asyncio.run(serve_run(run.env, run.openai))
    assert "--env.items 1/4" in refused.value.fix
