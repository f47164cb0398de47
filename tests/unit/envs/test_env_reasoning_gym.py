"""Tasks of reasoning-gym. Its package is installed wherever these tests run in full (extra `reasoning-gym`)."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest

from treadle.config.env import EnvConfig
from treadle.envs.base import load_environment
from treadle.envs.engine_client import Completion
from treadle.envs.rewards import RewardInput, RewardPool
from treadle.envs.scoring import ScoreRules
from treadle.envs.tasks.reasoning_gym import (
    KNOWN_BROKEN,
    NUM_HELD_OUT,
    SAFE_ANSWERS,
    EntryIndex,
    entry_at,
    extract_answer,
)
from treadle.errors import ConfigError

library = pytest.importorskip("reasoning_gym")


def loaded(task, **settings):
    return load_environment(EnvConfig(name="reasoning_gym", task=task, **settings))


def opened(task, **settings):
    env = loaded(task, **settings)
    asyncio.run(env.open())
    return env


def score(env, item, text):
    return env.rewards.score(RewardInput(text, answer=item.answer, metadata=dict(item.metadata)))


def test_items_depend_on_their_index_and_held_out_ones_are_not_trained_on():
    env, again = opened("basic_arithmetic", seed=1), opened("basic_arithmetic", seed=1)
    indexes = [0, 1, 999, 1000, 123_456]
    assert [env.train_item(i) for i in indexes] == [again.train_item(i) for i in reversed(indexes)][::-1]
    assert opened("basic_arithmetic", seed=2).train_item(0) != env.train_item(0)
    assert opened("basic_arithmetic", seed=2).eval_items() == env.eval_items()
    assert len(env.eval_items()) == NUM_HELD_OUT


def test_a_task_of_few_questions_keeps_them_apart_all_the_same():
    """Of two digits to add there are few: by chance alone, many training questions would be held out."""
    settings = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    env = opened("chain_sum", args=settings)
    held_out = {item.prompt for item in env.eval_items()}
    assert 20 < len(held_out) < NUM_HELD_OUT
    assert not held_out & {env.train_item(index).prompt for index in range(200)}


def test_a_task_with_nothing_left_to_train_on_says_so():
    settings = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    env = opened("chain_sum", args=settings)
    env._held_out = {env._item_at(EntryIndex(seed, n)).prompt: None for seed in (0, 1000, 2000) for n in range(1000)}
    with pytest.raises(ConfigError, match="hardly a question"):
        env.train_item(0)


@pytest.mark.parametrize(
    ("text", "worth"),
    [
        ("<answer>GOLD</answer>", 1.0),
        ("So:\n<answer>\n GOLD \n</answer> That is all.", 1.0),
        ("<answer>7</answer> no, <answer>GOLD</answer>", 1.0),
        ("<answer>GOLD</answer> no, <answer>x</answer>", 0.0),
        ("<think><answer>GOLD</answer></think>", 0.0),
        ("GOLD", 0.0),
        ("<answer>GOLD", 0.0),
        ("", 0.0),
    ],
)
def test_the_last_answer_in_tags_counts(text, worth):
    env = loaded("chain_sum")
    item = env.train_item(0)
    assert score(env, item, text.replace("GOLD", item.answer)) == worth


def test_the_tags_nearest_to_each_other_belong_together():
    assert extract_answer("<answer>a <answer> b </answer>") == "b"
    assert extract_answer("<answer></answer>") == ""
    assert extract_answer("nothing") is None


@pytest.mark.parametrize(
    "task", ["basic_arithmetic", "arc_1d", "rearc", "sudoku", "countdown", "graph_color", "knights_knaves"]
)
def test_in_the_workers_the_tasks_own_scorer_judges(task):
    """The entry is generated again there: tuples, numbers of numpy and all."""
    env = loaded(task)
    item = env.train_item(0)

    async def run():
        async with RewardPool(num_workers=1, time_limit_s=30) as pool:
            texts = [env.gold_completion(item), "<answer>nonsense</answer>"]
            completions = [Completion([1], [-0.5], text, "stop", policy_version=0) for text in texts]
            return await ScoreRules(env, pool).scores(item, completions)

    right, wrong = asyncio.run(run())
    assert (right.reward, right.is_right) == (1.0, True)
    assert wrong.reward is not None
    assert wrong.reward < 0.2
    assert not wrong.is_right


@pytest.mark.parametrize("task", sorted(SAFE_ANSWERS))
def test_answers_that_a_scorer_would_run_as_python_are_not_shown_to_it(task, tmp_path):
    flag = tmp_path / "was-here"
    attack = f"__import__('pathlib').Path({str(flag)!r}).touch()"
    env = loaded(task, args={"allow_broken": True})
    item = env.train_item(0)
    for text in (attack, f"[{attack}]", f"({attack})", f"{attack} + C", "[[1, 2], exec('')]", "9**9**9**9", "exit()"):
        assert score(env, item, f"<answer>{text}</answer>") == 0.0
    assert not flag.exists()


@pytest.mark.parametrize("task", sorted(set(SAFE_ANSWERS) - {"intermediate_integration"}))
def test_right_answers_are_made_of_harmless_signs(task):
    for number in range(10):
        answer = entry_at(task, "{}", EntryIndex(0, number))["answer"]
        assert SAFE_ANSWERS[task].fullmatch(answer), answer


def test_a_scorer_that_runs_code_without_the_guard_does():
    """What the guard is for: without it, this text is run. If this fails, the package has been fixed."""
    dataset = library.create_dataset("spiral_matrix", seed=0, size=1)
    ran: list[str] = []
    sys.modules["treadle_test_flag"] = type(sys)("treadle_test_flag")
    sys.modules["treadle_test_flag"].ran = ran.append
    try:
        dataset.score_answer(answer="[__import__('treadle_test_flag').ran('yes')]", entry=dataset[0])
    finally:
        del sys.modules["treadle_test_flag"]
    assert ran == ["yes"]


@pytest.mark.parametrize("task", sorted(KNOWN_BROKEN))
def test_tasks_that_are_known_to_be_broken_are_refused_with_the_reason(task):
    with pytest.raises(ConfigError) as refused:
        loaded(task)
    assert KNOWN_BROKEN[task] in str(refused.value)
    assert "allow_broken" in str(refused.value)


def test_a_broken_task_can_be_insisted_on_and_is_broken():
    env = loaded("game_of_life_halting", args={"allow_broken": True})
    assert score(env, env.train_item(0), "<answer>nonsense</answer>") == 1.0


def test_every_refused_task_exists():
    from reasoning_gym.factory import DATASETS

    assert set(KNOWN_BROKEN) <= set(DATASETS)
    assert set(SAFE_ANSWERS) <= set(DATASETS)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"task": "basic_arithmetik"}, "did you mean 'basic_arithmetic'"),
        ({"task": "zzz"}, "known tasks: ab, acre"),
        ({"task": "chain_sum", "args": {"min_term": 2}}, "does not take"),
        ({"task": "chain_sum", "args": {"min_terms": -2}}, "does not take"),
        ({"task": "chain_sum", "args": {"seed": 2}}, "pass --env.seed"),
    ],
)
def test_what_the_task_does_not_take_is_refused_at_the_start(settings, problem):
    with pytest.raises(ConfigError) as refused:
        loaded(**settings)
    assert problem in str(refused.value)


def test_an_entry_that_differs_in_the_worker_is_an_error_not_a_score():
    env = loaded("chain_sum")
    item = env.train_item(0)
    metadata = {**item.metadata, "asked": "another question"}
    with pytest.raises(ValueError, match="another question of the same seed"):
        env.rewards.score(RewardInput("<answer>1</answer>", metadata=metadata))


def test_without_the_package_the_error_names_the_extra():
    script = (
        "import sys\n"
        "sys.modules['reasoning_gym'] = None\n"
        "from treadle.config.env import EnvConfig\n"
        "from treadle.envs.base import load_environment\n"
        "load_environment(EnvConfig(name='reasoning_gym'))\n"
    )
    run = subprocess.run([sys.executable, "-c", script], check=False, capture_output=True, text=True, timeout=60)
    assert "MissingExtra" in run.stderr
    assert "pip install 'treadle[reasoning-gym]'" in run.stderr
