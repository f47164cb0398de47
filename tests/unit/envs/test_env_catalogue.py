"""An environment's file: errors are reported with the line before anything starts."""

import subprocess
import sys
import textwrap

import pytest

from treadle.config.env import EnvConfig
from treadle.envs.base import load_environment
from treadle.envs.rewards import registry
from treadle.errors import ConfigError

TASK = """
    from treadle.envs import Environment, Item, environment
    from treadle.envs.rewards import RewardInput, reward

    {above}

    @environment("task-{name}")
    class Task(Environment):
        {inside}

        def train_item(self, index):
            return Item.ask(f"Say {{index}}", answer=str(index))

        def eval_items(self):
            return []
"""


@pytest.fixture
def load(tmp_path, request):
    """Load an environment written into a file: the usual one, with more above and inside of its class."""

    def write_and_load(inside="rewards = ('exact_match',)", above="", **settings):
        text = TASK.format(name=request.node.name, inside=inside, above=textwrap.indent(above, "    ").strip())
        (tmp_path / "task.py").write_text(textwrap.dedent(text))
        return load_environment(EnvConfig(name=str(tmp_path / "task.py"), **settings))

    return write_and_load


def refusal(path, text):
    path.write_text(text)
    with pytest.raises(ConfigError) as refused:
        load_environment(EnvConfig(name=str(path)))
    return refused.value


def test_a_file_with_a_slip_ends_the_command_with_one_line_and_its_remedy(tmp_path):
    (tmp_path / "bad.py").write_text("import json\ndef f()\n    pass\n")
    command = [sys.executable, "-m", "treadle", "env", "bad.py", "validate"]
    run = subprocess.run(command, check=False, capture_output=True, text=True, cwd=tmp_path)
    assert run.returncode == 2
    assert "bad.py cannot be loaded: line 2: expected ':'" in run.stderr
    assert "Traceback" not in run.stderr


def test_a_package_that_is_missing_is_named_with_the_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    error = refusal(tmp_path / "bad.py", "import nosuchpkg\n")
    assert error.message == "bad.py, line 1: No module named 'nosuchpkg'"
    assert error.fix == "install it into this environment"


def test_a_module_beside_the_file_is_not_to_be_installed(tmp_path):
    (tmp_path / "beside_it.py").write_text("")
    error = refusal(tmp_path / "bad.py", "\nimport beside_it\n")
    assert error.message == f"{tmp_path}/bad.py, line 2: No module named 'beside_it'"
    assert error.fix == f"put PYTHONPATH={tmp_path} before the command"


@pytest.mark.parametrize(
    ("text", "cause", "line"),
    [
        ("import json\n\nROWS = json.loads('oops')\n", "JSONDecodeError: Expecting value", 3),
        ("def f():\n    return 1 / 0\n\n\nf()\n", "ZeroDivisionError: division by zero", 2),
        ("import sys\n\nsys.exit(3)\n", "SystemExit: 3", 3),
    ],
)
def test_whatever_else_fails_is_reported_with_the_users_own_line(tmp_path, text, cause, line):
    error = refusal(tmp_path / "bad.py", text)
    assert error.message.startswith(f"{tmp_path}/bad.py cannot be loaded: {cause}")
    assert error.fix == f"correct {tmp_path}/bad.py:{line}"


def test_a_suffix_that_was_forgotten_is_suggested(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_env.py").write_text("")
    for name, meant in (("my_env", "my_env.py"), ("./my_env", "./my_env.py"), ("my_env:one", "my_env.py:one")):
        with pytest.raises(ConfigError) as refused:
            load_environment(EnvConfig(name=name))
        assert refused.value.fix == f"did you mean {meant}?"


def test_defaults_hold_for_whatever_was_not_set(load):
    config = load("rewards = ('exact_match',); defaults = {'group_size': 4, 'temperature': '0.5'}", group_size=6).config
    assert (config.group_size, config.temperature, config.max_token_length) == (6, 0.5, 512)


def test_a_misspelt_default_is_refused_with_the_nearest_right_one(load):
    with pytest.raises(ConfigError, match="unknown key 'max_token_lenght' in the defaults of Task") as refused:
        load("rewards = ('exact_match',); defaults = {'max_token_lenght': 64}")
    assert refused.value.fix == "did you mean 'max_token_length'?"


def test_a_default_that_cannot_be_right_is_refused(load):
    with pytest.raises(ConfigError, match="'group_size' is 0 in the defaults of Task") as refused:
        load("rewards = ('exact_match',); defaults = {'group_size': 0}")
    assert refused.value.fix == "correct it in the class"


def test_an_environment_without_rewards_score_and_rollout_is_refused(load):
    with pytest.raises(ConfigError, match="'task' does not say what an answer is worth") as refused:
        load("pass")
    assert refused.value.fix == "give Task rewards, or a method score or rollout"


@pytest.mark.parametrize(
    "inside", ["score = lambda self, item, text, completion: 1.0", "rollout = lambda self, item, model: None"]
)
def test_a_method_of_its_own_is_enough(load, inside):
    assert load(inside).rewards == ()


@pytest.mark.parametrize("arguments", ["completion", "completions, **kwargs"])
def test_plain_functions_can_be_rewards_of_an_environment(load, arguments):
    made = load("rewards = (r,)", above=f"def r({arguments}):\n    return 1.0\n")
    assert registry.create(made.rewards).rewards[0].name == "r"


def test_rewards_of_the_settings_replace_those_of_an_environment(tmp_path):
    (tmp_path / "mine.py").write_text("def is_short(completions, **kwargs):\n    return [1.0 for _ in completions]\n")
    chosen = f'[{{"type": "{tmp_path}/mine.py:is_short", "weight": 0.5}}, "exact_match"]'
    for name in ("jsonl", "arithmetic", "gsm8k"):
        reward = registry.create(load_environment(EnvConfig(name=name, rewards=chosen)).rewards)
        assert [(part.name, part.weight) for part in reward.rewards] == [("is_short", 0.5), ("exact_match", 1.0)]
    with pytest.raises(ConfigError, match="unknown reward 'exact_mach'"):
        load_environment(EnvConfig(name="jsonl", rewards="exact_mach"))


def test_a_class_that_lacks_a_method_is_refused_by_its_name(tmp_path):
    file = tmp_path / "half.py"
    file.write_text(
        "from treadle.envs import Environment, environment\n\n\n"
        "@environment('half')\nclass Half(Environment):\n    def train_item(self, index):\n        return None\n"
    )
    with pytest.raises(ConfigError, match=r"lacks eval_items\(\)") as caught:
        load_environment(EnvConfig(name=str(file)))
    assert "class Half" in caught.value.fix
