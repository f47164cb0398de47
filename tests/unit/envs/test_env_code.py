"""The environment `code`: tasks made up here, rows of files, and what counts as right."""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.unit.envs.sandbox_support import needs_sandbox
from treadle.config.env import EnvConfig
from treadle.envs.base import load_environment
from treadle.envs.engine_client import Completion
from treadle.envs.rewards import InlineScorer
from treadle.envs.sandbox.execution import SandboxLimits, run_tests
from treadle.envs.scoring import ScoreRules
from treadle.envs.tasks.code import NUM_TESTS, generated_tasks
from treadle.errors import ConfigError

pytestmark = needs_sandbox


def opened(**settings):
    env = load_environment(EnvConfig(name="code", **settings))
    asyncio.run(env.open())
    return env


def scores(env, item, *texts):
    completions = [Completion([1], [-0.5], text, "stop", policy_version=0) for text in texts]
    return asyncio.run(ScoreRules(env, InlineScorer()).scores(item, completions))


def rows(folder, *fields):
    path = folder / "tasks.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in fields))
    return str(path)


def test_the_generated_tasks_are_many_and_always_the_same():
    tasks = list(generated_tasks())
    assert len(tasks) == len({task.question for task, _ in tasks}) == 208
    assert sum(is_held_out for _, is_held_out in tasks) == 39
    assert tasks == list(generated_tasks())
    assert {len(task.tests) for task, _ in tasks} == {NUM_TESTS}
    assert tasks[0][0].question == (
        "Write a Python function sum_of_multiples(values) that returns the sum of those integers in the list values "
        "that are divisible by 2.\nFor example, " + tasks[0][0].question.partition("For example, ")[2]
    )


def test_the_example_in_a_question_is_true_and_no_test():
    for task, _ in generated_tasks():
        example = task.question.partition("For example, ")[2]
        namespace: dict[str, object] = {}
        exec(task.solution, namespace)  # noqa: S102  # our own
        assert eval(example, namespace) is True  # noqa: S307
        assert f"assert {example}" not in task.tests


def test_solutions_of_other_patterns_and_numbers_do_not_pass():
    """The tests of a task tell its number: with another one, at least one of them fails."""
    tasks = [task for task, _ in generated_tasks()][::16]  # k = 2 of every template
    others = [task for task, _ in generated_tasks()][1::16]  # k = 3
    for task, other in zip(tasks, others, strict=True):
        assert run_tests(task.solution, task.tests, SandboxLimits()) == [""] * NUM_TESTS
        assert run_tests(other.solution, task.tests, SandboxLimits()) != [""] * NUM_TESTS


def test_what_is_held_out_is_mixed_and_never_trained_on():
    env = opened(seed=5)
    held_out = [item.prompt for item in env.eval_items()]
    assert not set(held_out) & {env.train_item(index).prompt for index in range(169)}
    assert len({prompt.partition("(")[0] for prompt in held_out[:8]}) > 4
    assert held_out == [item.prompt for item in opened(seed=6).eval_items()]


def test_a_right_answer_is_right_and_one_that_only_ends_well_is_not():
    env = opened()
    item = env.train_item(0)
    right, wrong = scores(env, item, env.gold_completion(item), "```python\nraise SystemExit(0)\n```")
    assert (right.reward, right.is_right) == (1.0, True)
    assert (wrong.reward, wrong.is_right) == (0.0, False)


def test_rows_with_asserts_with_pairs_and_in_the_forms_of_known_datasets(tmp_path):
    data = rows(
        tmp_path,
        {"prompt": "Write add.", "tests": ["assert add(1, 1) == 2", "assert add(1, 2) == 3"], "solution": "add = sum"},
        {"question": "Double the number.", "tests": [{"input": "4", "output": "8"}], 
         "answer": "print(2 * int(input()))"},
        {"text": "Write add.", "test_list": ["assert add(ONE, 1) == 2"], "test_setup_code": "ONE = 1",
         "code": "def add(a, b): return a + b"},
        {"prompt": "def add(a, b):\n", "test": "def check(candidate):\n    assert candidate(1, 1) == 2",
         "entry_point": "add", "canonical_solution": "    return a + b\n"},
        {"prompt": "Write sorted.", "tests": ["assert sorted([2]) == [2]"], "names": ["sorted"],
         "solution": "def sorted(x): return x"},
    )  # fmt: skip
    (tmp_path / "train.jsonl").write_text(json.dumps({"prompt": "p", "tests": ["assert 1"]}))
    env = opened(data=str(tmp_path / "train.jsonl"), eval_data=data)
    items = sorted(env.eval_items(), key=lambda item: item.answer)
    found = {item.answer: scores(env, item, env.gold_completion(item))[0].reward for item in items}
    assert list(found.values()).count(1.0) == 4
    assert found["add = sum"] == 0.0


def test_rows_that_cannot_be_used_are_reported_with_their_place(tmp_path):
    good = {"prompt": "Write f.", "tests": ["assert f() == 1"]}
    data = rows(
        tmp_path,
        good,
        {"prompt": "No tests."},
        {"tests": ["x"]},
        {**good, "tests": [{"input": "1"}]},
        {**good, "tests": "def check(candidate):\n    assert candidate() == 1"},
        {**good, "prompt": "g"},
    )
    env = opened(data=data)
    assert [broken.place.rpartition(":")[2] for broken in env.data.broken] == ["2", "3", "4", "5"]
    assert "'tests', 'test_list', 'test'" in env.data.broken[0].problem
    assert "nothing in this test is run" in env.data.broken[3].problem


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"args": {"total_s": 40.0}}, "a reward may take 30 s"),
        ({"args": {"alL_or_nothing": True}}, "it knows: all_or_nothing"),
        ({"args": {"test_s": -1.0}}, "cannot be"),
    ],
)
def test_settings_that_cannot_be_are_refused_at_the_start(settings, problem):
    with pytest.raises(ConfigError) as refused:
        load_environment(EnvConfig(name="code", **settings))
    assert problem in str(refused.value)


def test_all_or_nothing_is_a_setting(tmp_path):
    data = rows(tmp_path, *({"prompt": f"p{n}", "tests": ["assert 1", "assert f() == 1"]} for n in range(2)))
    for all_or_nothing, reward in ((False, 0.5), (True, 0.0)):
        env = opened(data=data, args={"all_or_nothing": all_or_nothing})
        (score,) = scores(env, env.train_item(0), "def f(): return 2")
        assert (score.reward, score.is_right) == (reward, False)
