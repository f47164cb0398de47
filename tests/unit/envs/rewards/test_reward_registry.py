"""Rewards by name: the right one, in any interpreter, with checked settings."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from treadle.envs.rewards import (
    BoxedMath,
    CombinedReward,
    LengthReward,
    Registry,
    Reward,
    RewardInput,
    ThinkFormatReward,
    registry,
    reward,
)
from treadle.envs.rewards.registry import BUILT_IN
from treadle.errors import ConfigError

SETTINGS = {
    "regex": {"pattern": "x"},
    "combined": {"rewards": ["length"]},
    "judge": {"url": "http://127.0.0.1:1", "model": "m"},
    "reward_model": {"model": "m"},
}


def test_every_name_gives_its_class_in_a_fresh_interpreter_without_torch():
    script = (
        "import json, sys\n"
        "from treadle.envs.rewards.registry import BUILT_IN, registry\n"
        f"settings = {SETTINGS!r}\n"
        "made = {name: type(registry.create(name, **settings.get(name, {}))) for name in BUILT_IN}\n"
        "heavy = [name for name in ('torch', 'transformers', 'sympy', 'pydantic') if name in sys.modules]\n"
        "print(json.dumps([{name: f'{cls.__module__}:{cls.__name__}' for name, cls in made.items()}, heavy]))\n"
    )
    output = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    made, heavy = json.loads(output)
    assert made == BUILT_IN
    assert heavy == []


@pytest.mark.parametrize("name", ["think_format", "thinkformat", "ThinkFormat", "ThinkFormatReward", "think-format"])
def test_one_name_in_every_spelling(name):
    assert type(registry.create(name)) is ThinkFormatReward


def test_settings_weight_and_name_come_from_arguments_or_a_dict():
    assert registry.create("length", target=50) == LengthReward(target=50)
    made = registry.create({"type": "boxed_math", "weight": 0.5, "name": "maths", "params": {"wrong": 0.0}})
    assert made == BoxedMath(wrong=0.0, weight=0.5, name="maths")
    assert registry.create(made) is made


def test_a_reward_made_from_its_own_config_is_the_same():
    for name in BUILT_IN:
        made = registry.create(name, **SETTINGS.get(name, {}), weight=0.25)
        assert registry.create(json.loads(json.dumps(made.to_config()))) == made


def test_a_list_is_a_sum():
    made = registry.create(["length", {"type": "think_format", "weight": 2}])
    assert isinstance(made, CombinedReward)
    assert [(part.name, part.weight) for part in made.rewards] == [("length", 1.0), ("think_format", 2)]


@pytest.mark.parametrize(
    ("what", "settings", "words"),
    [
        ("lenght", {}, "length"),  # the error suggests it
        ("nonsense_of_all_kinds", {}, "known rewards"),
        ("length", {"target": "long"}, "target"),
        ("length", {"goal": 3}, "its settings are: target"),
        ("length", {"target": 0}, "1 or more"),
        ("length", {"weight": float("nan")}, "finite weight"),
        ("regex", {"pattern": "("}, "is no pattern"),
        ("json_schema", {"schema": {"type": "nothing"}}, "no JSON schema"),
        ({"type": "length", "wieght": 1}, {}, "wieght"),
        ({"weight": 1}, {}, "no 'type'"),
        ("no_such_module:thing", {}, "no_such_module"),
        ("json:thing", {}, "has no 'thing'"),
        ("json:JSONDecoder", {}, "is no reward"),
        ("/no/such/file.py:thing", {}, "there is no file"),
    ],
)
def test_what_cannot_be_right_is_refused_with_a_remedy(what, settings, words):
    with pytest.raises(ConfigError) as refused:
        registry.create(what, **settings)
    assert words in str(refused.value)
    assert refused.value.fix


def test_a_decorated_function_is_a_reward_and_still_a_function():
    @reward
    def shouting(completion: RewardInput, sign: str = "!") -> float:
        return completion.text.count(sign)

    assert shouting(RewardInput("no! no!")) == 2
    assert shouting.score(RewardInput("no!")) == 1
    assert shouting.name == "shouting"
    assert registry.create("shouting", sign="?").score(RewardInput("what??")) == 2
    assert registry.create({"type": "shouting", "weight": 3}).weight == 3
    with pytest.raises(ConfigError, match="its settings are: sign"):
        registry.create("shouting", loudness=3)


@pytest.mark.parametrize("arguments", ["prompt, completion", "completion, *, answer", "", "**kwargs"])
def test_a_function_with_other_arguments_is_refused_with_what_it_may_take(tmp_path, arguments):
    file = tmp_path / "mine.py"
    file.write_text(f"def mine({arguments}):\n    return 1.0\n")
    with pytest.raises(ConfigError, match="a reward takes one argument, completion: RewardInput") as refused:
        registry.create(f"{file}:mine")
    assert refused.value.fix.startswith("write def mine(completion: RewardInput)")


def test_a_reward_of_groups_is_refused_with_what_it_takes():
    with pytest.raises(ConfigError, match=r"takes one argument, group: list\[RewardInput\]"):

        @reward(group=True)
        def ranked(prompts, completions):
            return [1.0 for _ in completions]


def test_a_value_that_is_no_reward_is_refused_with_a_fix():
    for what, message, fix in (
        (LengthReward, "LengthReward is a class", "make one of it: LengthReward()"),
        (3, "3 is not a reward", "give a name"),
    ):
        with pytest.raises(ConfigError, match=message) as refused:
            registry.create([what])
        assert refused.value.fix.startswith(fix)


def test_a_coroutine_is_refused():
    with pytest.raises(ConfigError, match="plain function"):

        @reward
        async def slow(completion: RewardInput) -> float:
            return 1.0


def test_a_decorated_class_is_found_under_its_name():
    @reward
    class NearReward(Reward):
        tolerance: float = 0.5

        def score(self, completion: RewardInput) -> float:
            return abs(float(completion.text) - float(completion.answer)) <= self.tolerance

    made = registry.create("near", tolerance=0.1)
    assert type(made) is NearReward
    assert (made.score(RewardInput("4.05", answer="4")), made.score(RewardInput("4.2", answer="4"))) == (True, False)


def test_a_name_belongs_to_one_reward():
    with pytest.raises(ConfigError, match="built-in"):
        reward(name="length")(lambda completion: 1.0)
    own = Registry({})
    own.add("mine", LengthReward)
    own.add("mine", LengthReward)  # a file that is run twice
    with pytest.raises(ConfigError, match="two rewards"):
        own.add("Mine", ThinkFormatReward)


def test_a_class_with_an_init_is_refused():
    with pytest.raises(TypeError, match="__init__"):

        class OldStyleReward(Reward):
            def __init__(self, tolerance):
                self.tolerance = tolerance


def test_a_reward_does_not_change():
    made = LengthReward()
    with pytest.raises(AttributeError):
        made.target = 3
    assert made.target == 200


def test_a_reward_in_a_file_is_found_by_its_path(tmp_path):
    file = tmp_path / "my_rewards.py"
    file.write_text(
        "from treadle.envs.rewards import reward\n"
        "@reward\n"
        "def tidy_in_a_file(completion):\n"
        "    return completion.text == completion.text.strip()\n"
        "def undecorated(completion, bonus=1.0):\n"
        "    return bonus\n"
    )
    tidy = registry.create(f"{file}:tidy_in_a_file")
    assert tidy.score(RewardInput("x")) is True
    assert tidy.to_config()["type"] == f"{file}:tidy_in_a_file"
    assert registry.create("tidy_in_a_file") == tidy
    assert registry.create(f"{file}:undecorated", bonus=2.0).score(RewardInput("")) == 2.0
