"""YAML files of Atropos' environments: spellings are accepted, keys without effect are reported, none is ignored."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from treadle.config import RunConfig, load_run
from treadle.config.env import EnvConfig, ServerConfig
from treadle.config.flags import FlagParser, add_flags, given
from treadle.envs.base import load_environment
from treadle.errors import ConfigError

EXAMPLES = Path(__file__).parents[3] / "configs"


def load(tmp_path: Path, text: str, overrides: dict[str, str] | None = None, *, name: str = "env.yaml") -> RunConfig:
    file = tmp_path / name
    file.write_text(text)
    return load_run(file, overrides)


@pytest.mark.parametrize("name", ["env.yaml", "env.yml"])
def test_an_environments_file(tmp_path: Path, name: str) -> None:
    run = load(
        tmp_path,
        "env:\n  group_size: 4\n  max_batches_offpolicy: 3\n  max_num_workers_per_node: 24\n  total_steps: -1\n"
        "  ensure_scores_are_not_same: true\nopenai:\n  base_url: http://localhost:9004/v1\n  server_type: vllm\n",
        name=name,
    )
    assert (run.env.group_size, run.env.max_age, run.env.max_num_workers, run.env.total_steps) == (4, 3, 24, -1)
    assert run.env.ensure_scores_are_not_same
    assert run.openai.base_url == ("http://localhost:9004/v1",)


def test_a_list_of_one_server_is_that_server(tmp_path: Path) -> None:
    run = load(tmp_path, "openai:\n  - base_url: http://localhost:9004/v1\n    api_key: x\n")
    assert run.openai == ServerConfig(base_url="http://localhost:9004/v1", api_key="x")


@pytest.mark.parametrize(
    ("keys", "expected"),
    [(("", ""), ""), (("  api_key: a\n", "  api_key: a\n"), "a"), (("  api_key: a\n", "  api_key: b\n"), "a b")],
)
def test_a_list_of_servers_is_one_section_with_all_of_them(
    tmp_path: Path, keys: tuple[str, str], expected: str
) -> None:
    text = f"openai:\n- base_url: http://a/v1\n  timeout: 60\n{keys[0]}- base_url: http://b/v1\n{keys[1]}"
    run = load(tmp_path, text, {"openai.server_type": "openai"})
    assert run.openai == ServerConfig(
        base_url=("http://a/v1", "http://b/v1"), api_key=expected, timeout=60.0, server_type="openai"
    )
    first, second = run.openai.each()
    assert (first.base_url, second.base_url) == (("http://a/v1",), ("http://b/v1",))
    assert (first.api_key, second.api_key) == (expected[:1], expected[-1:])


@pytest.mark.parametrize(
    ("servers", "says", "fix"),
    [
        ("{base_url: a, timeout: 1}, {base_url: b, timeout: 2}", "different values of 'timeout': 1 and 2", "the same"),
        ("{base_url: a}, {timeout: 2}", "names 2 servers under 'openai', and not all", "write 'base_url: http://"),
        ("{base_url: a, api_key: x}, {base_url: b, api_key: y}, {base_url: c}", "2 of the 3 servers", "give each"),
        ("{base_url: a}, {base_url: a}", "must name each engine once, and it is a a", ""),
        ("{base_url: a}, 7", "'openai' is 7", "write its settings below"),
    ],
)
def test_servers_that_do_not_go_together_are_refused(tmp_path: Path, servers: str, says: str, fix: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, f"openai: [{servers}]\n")
    assert says in caught.value.message
    assert fix in caught.value.fix


def test_several_urls_may_be_given_as_flags() -> None:
    parser = FlagParser(prog="treadle env")
    add_flags(parser, ServerConfig, prefix="openai.", dotted=True)
    words = ["--openai.base_url", "http://a/v1", "http://b/v1", "--openai.api_key", "x"]
    assert load_run(None, given(parser.parse_args(words))).openai.base_url == ("http://a/v1", "http://b/v1")


def test_what_has_no_effect_is_named_and_passed_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = load(
        tmp_path,
        "env:\n  tokenizer_name: Qwen/Qwen3-4B\n  include_messages: true\n  batch_size: 64\n  group_size: 4\n"
        "openai:\n  num_requests_for_eval: 256\nslurm: false\ntesting: true\n",
    )
    assert run == RunConfig(env=EnvConfig(group_size=4))
    warnings = capsys.readouterr().err
    for key in (
        "env.tokenizer_name",
        "env.include_messages",
        "env.batch_size",
        "openai.num_requests_for_eval",
        "slurm",
    ):
        assert f"env.yaml: '{key}' has no effect: " in warnings
    assert len(warnings.splitlines()) == 6


@pytest.mark.parametrize("word", ["None", '"None"', "null", "~", ""])
def test_none_is_empty(tmp_path: Path, word: str) -> None:
    assert load(tmp_path, f"env:\n  wandb_name: {word}\n").env.wandb_name is None


@pytest.mark.parametrize("text", ["", "# nothing yet\n", "env:\n", "env: {}\nopenai: []\n"])
def test_a_file_may_say_nothing(tmp_path: Path, text: str) -> None:
    assert load(tmp_path, text) == RunConfig()


@pytest.mark.parametrize(
    ("text", "says", "fix"),
    [
        ("env:\n  group_siez: 4\n", "unknown key 'env.group_siez'", "did you mean 'group_size'?"),
        ("envs:\n  group_size: 4\n", "unknown key 'envs'", "did you mean 'env'?"),
        ("env:\n  group_size: many\n", "'env.group_size' is 'many'", "correct --env.group-size"),
        ("env: 4\n", "'env' is 4", "write its settings below 'env:'"),
        ("env:\n  group_size: 4\n  group_size: 8\n", "'group_size' is given twice", "keep one of them"),
        ("env:\n  max_age: 1\n  max_batches_offpolicy: 3\n", "'env.max_batches_offpolicy' is another name", "keep one"),
        ("- env\n", "holds no settings", "write sections"),
        ("env: [\n", "cannot be parsed", "correct that line"),
        ("env: !!python/object:os.system {}\n", "cannot be parsed", "correct that line"),
    ],
)
def test_what_is_wrong_in_a_file_is_named_with_its_remedy(tmp_path: Path, text: str, says: str, fix: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text)
    assert says in caught.value.message
    assert "env.yaml" in caught.value.message
    assert fix in caught.value.fix


def test_an_anchor_that_holds_itself_is_no_endless_search(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        load(tmp_path, "env: &a\n  args: *a\n  group_size: x\n")


def test_flags_override_the_file_and_the_file_overrides_defaults(tmp_path: Path) -> None:
    text = "env:\n  name: gsm8k\n  max_token_length: 300\n  num_eval: 9\n"
    settings = load_environment(load(tmp_path, text, {"env.num_eval": "5"}).env).config
    assert (settings.num_eval, settings.max_token_length) == (5, 300)
    assert settings.ensure_scores_are_not_same, "what nobody set is as suits the environment"


def test_a_whole_run_can_be_yaml_too(tmp_path: Path) -> None:
    run = load(tmp_path, "steps: 7\ntrain:\n  lr: 1e-5\nenv:\n  group_size: 4\n")
    assert (run.steps, run.train.lr, run.env.group_size) == (7, 1e-5, 4)


@pytest.mark.parametrize(
    "spelling", [["--env.total_steps", "-1"], ["--env.total-steps", "-1"], ["--env.total_steps=-1"]]
)
def test_a_negative_number_is_a_value_and_no_flag(spelling: list[str]) -> None:
    parser = FlagParser(prog="treadle env")
    add_flags(parser, EnvConfig, prefix="env.", dotted=True)
    words = [*spelling, "--env.group_size", "4"]
    assert load_run(None, given(parser.parse_args(words))).env == EnvConfig(total_steps=-1, group_size=4)


def test_the_command_line_reads_the_file_and_tells_what_has_no_effect(tmp_path: Path) -> None:
    (tmp_path / "env.yaml").write_text("env:\n  include_messages: true\n  total_steps: 0\n")
    words = ["env", "arithmetic", "process", "--config", "env.yaml", "--env.batch_size", "64"]
    done = subprocess.run(
        [sys.executable, "-m", "treadle", *words], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert "env.yaml: 'env.include_messages' has no effect: " in done.stderr
    assert "--env.batch-size has no effect: " in done.stderr
    assert "there is nothing to write: total_steps is 0" in done.stderr, "so the file was read"


def test_the_example_files_load() -> None:
    environment = load_run(EXAMPLES / "gsm8k.yaml", {"env.name": "gsm8k"})
    assert (environment.env.total_steps, environment.env.eval_limit_ratio) == (120, 0.1)
    whole = load_run(EXAMPLES / "gsm8k.toml")
    whole.check_together()
    assert (whole.env.name, whole.steps, whole.env.max_token_length) == ("gsm8k", 120, 2048)
    for run in (environment, whole):
        assert load_environment(run.env).config.group_size == 8
