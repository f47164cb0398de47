"""The recipe countdown: its puzzles can be solved, and only exact expressions of the given numbers are right."""

from __future__ import annotations

from fractions import Fraction

import pytest

from tests.recipes import environment_of, script, working_folder
from treadle.envs import Item
from treadle.envs.engine_client import Completion
from treadle.errors import ConfigError

COUNTDOWN = script("countdown", "countdown.py")
ITEM = Item.ask("?", answer="(1 + 2) * 8", numbers=[8, 1, 2], target=24)


@pytest.fixture
def environment(tmp_path, monkeypatch):
    monkeypatch.chdir(working_folder(tmp_path))
    return environment_of("countdown")


def test_puzzles_have_a_solution_of_their_numbers_and_a_whole_target(environment):
    items = [*map(environment.train_item, range(300)), *environment.eval_items()]
    assert len(environment.eval_items()) == COUNTDOWN.NUM_HELD_OUT == environment.config.num_eval
    for item in items:
        numbers, target = item.metadata["numbers"], item.metadata["target"]
        assert COUNTDOWN.evaluate(item.answer, numbers) == target
        assert 3 <= len(numbers) <= 4
        assert target not in numbers
        assert str(target) in item.prompt
    assert {sign for item in items for sign in "+-*/" if sign in item.answer} == set("+-*/")


def test_numbers_and_target_of_a_held_out_puzzle_are_not_trained_on(environment):
    def key(item):
        return tuple(sorted(item.metadata["numbers"])), item.metadata["target"]

    held_out = {key(item) for item in environment.eval_items()}
    assert not held_out & {key(environment.train_item(index)) for index in range(1000)}


@pytest.mark.parametrize(
    ("answer", "worth"),
    [
        ("(1 + 2) * 8", 1.0),
        ("(1 + 2) * 8 = 24", 1.0),
        ("8 * (2 + 1)", 1.0),
        ("8 / (1 / 3)", 0.0),  # another number
        ("8 + 8 + 8", 0.0),  # one too often
        ("8 * 2 + 1", 0.1),
        ("8", 0.1),
        ("24", 0.0),
        ("8 / (1 - 1)", 0.0),
        ("2 ** 8", 0.0),
        ("8 - -2", 0.0),
        ("__import__('os').getpid()", 0.0),
        ("(" * 150 + "8" + ")" * 150, 0.0),
        ("8 *", 0.0),
        ("", 0.0),
    ],
)
def test_the_score_of_an_answer(environment, answer, worth):
    text = f"I think so. <answer>{answer}</answer>"
    score = environment.score(ITEM, text, Completion([1], [-1.0], text, "stop", 0))
    assert (score.reward, score.is_right) == (worth, worth == 1.0)


def test_an_answer_without_tags_is_worth_nothing(environment):
    score = environment.score(ITEM, "(1 + 2) * 8", Completion([1], [-1.0], "", "stop", 0))
    assert (score.reward, score.is_right) == (0.0, False)


def test_values_are_exact():
    assert COUNTDOWN.evaluate("1 / 3 * 3", [3, 1, 3]) == 1
    assert COUNTDOWN.evaluate("1 / 3", [3, 1]) == Fraction(1, 3)


def test_settings_without_a_puzzle_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(working_folder(tmp_path))
    with pytest.raises(ConfigError, match="max_numbers"):
        environment_of("countdown", env__args='{"min_numbers": 5}')
