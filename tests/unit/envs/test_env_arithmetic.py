import asyncio
import re

import pytest

from treadle.config.env import EnvConfig
from treadle.envs.base import Environment, Item, Score, environment, load_environment, stable_seed, stable_shuffle
from treadle.envs.engine_client import Completion
from treadle.envs.rewards import InlineScorer
from treadle.envs.scoring import ScoreRules
from treadle.envs.tasks.arithmetic import TASKS, Arithmetic, harder, split
from treadle.errors import ConfigError


def completion(text, *, num_tokens=6, finish_reason="stop"):
    return Completion([1] * num_tokens, [-0.5] * num_tokens, text, finish_reason, policy_version=0)


def test_the_addition_split_is_always_the_same():
    addition = split(TASKS["addition"])
    assert (len(addition.held_out), len(addition.train)) == (256, 4000)
    assert addition.held_out[:3] == ((28, 63), (46, 19), (71, 69))
    assert addition.train[:3] == ((45, 41), (99, 83), (41, 99))
    assert stable_seed(*(n for pair in addition.held_out for n in pair)) == 8486827889360832801
    assert stable_seed(*(n for pair in addition.train for n in pair)) == 72200029490543812


@pytest.mark.parametrize(
    ("task", "held_out", "train"),
    [
        ("comparison", 1479685027079665129, 3668781531013353912),
        ("multiplication", 7115685286379324118, 5043060473580521843),
    ],
)
def test_the_other_splits_are_always_the_same_too(task, held_out, train):
    parts = split(harder(TASKS[task], 0))
    assert stable_seed(*(n for pair in parts.held_out for n in pair)) == held_out
    assert stable_seed(*(n for pair in parts.train for n in pair)) == train


@pytest.mark.parametrize(
    ("task", "difficulty", "prompt", "answer"),
    [
        ("addition", 1, "Answer with only the number. What is 111 + 965?", "1076"),
        ("addition", 2, "Answer with only the number. What is 301 + 427 + 441?", "1169"),
        ("addition", 4, "Answer with only the number. What is 4671 + 4076 + 8912 + 9061?", "26720"),
        ("comparison", 3, "Answer with only the number. Which number is the largest, 35364, 70859 or 46519?", "70859"),
        ("multiplication", 1, "Answer with only the number. What is 34 x 99?", "3366"),
        ("multiplication", 2, "Answer with only the number. What is 98 x 22 x 71?", "153076"),
    ],
)
def test_difficulty_adds_digits_and_numbers_in_turn(task, difficulty, prompt, answer):
    env = Arithmetic(EnvConfig(task=task, difficulty=difficulty))
    first = env.train_items()[0]
    assert (first.prompt, first.answer) == (prompt, answer)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("difficulty", [1, 2, 3, 20])
def test_harder_numbers_that_are_held_out_are_trained_on_in_no_order(task, difficulty):
    parts = split(harder(TASKS[task], difficulty))
    assert (len(parts.held_out), len(set(parts.train))) == (256, 4000)
    assert not {tuple(sorted(n)) for n in parts.held_out} & {tuple(sorted(n)) for n in parts.train}
    lengths = {len(str(number)) for numbers in parts.train for number in numbers}
    assert len(lengths) == 1


def test_a_difficulty_that_does_not_exist_is_refused():
    with pytest.raises(ConfigError, match="choose 0 to 20"):
        load_environment(EnvConfig(difficulty=21))


@pytest.mark.parametrize(
    ("task", "num_held_out", "num_train", "low", "high"),
    [("addition", 256, 4000, 10, 99), ("comparison", 256, 4000, 100, 999), ("multiplication", 24, 77, 2, 12)],
)
def test_no_held_out_pair_is_trained_in_either_order(task, num_held_out, num_train, low, high):
    parts = split(TASKS[task])
    assert (len(set(parts.held_out)), len(set(parts.train))) == (num_held_out, num_train)
    held_out = {frozenset(pair) for pair in parts.held_out}
    assert len(held_out) == num_held_out
    assert not held_out & {frozenset(pair) for pair in parts.train}
    assert {low <= number <= high for pair in parts.held_out + parts.train for number in pair} == {True}


@pytest.mark.parametrize(
    ("task", "prompt", "answer"),
    [
        ("addition", "Answer with only the number. What is 57 + 83?", "140"),
        ("comparison", "Answer with only the number. Which number is larger, 57 or 83?", "83"),
        ("multiplication", "Answer with only the number. What is 57 x 83?", "4731"),
    ],
)
def test_the_wording_of_each_task(task, prompt, answer):
    item = TASKS[task].item((57, 83))
    assert (item.prompt, item.answer) == (prompt, answer)


def prompts(seed, indexes):
    env = Arithmetic(EnvConfig(task="addition", seed=seed))
    return [env.train_item(index).prompt for index in indexes]


def test_an_epoch_has_every_training_pair_once_in_an_order_by_the_seed():
    first, second = prompts(1, range(4000)), prompts(1, range(4000, 8000))
    assert len(set(first)) == 4000
    assert set(first) == set(second)
    assert first != second
    assert first != prompts(2, range(4000))


def test_a_prompt_does_not_depend_on_what_was_asked_before():
    assert prompts(1, [4001, 3999]) == [*prompts(1, [4001]), *prompts(1, [3999])]
    assert prompts(0, [0]) == ["Answer with only the number. What is 20 + 27?"]


def test_the_seed_does_not_change_the_held_out_prompts():
    assert (
        Arithmetic(EnvConfig(task="addition", seed=1)).eval_items()
        == Arithmetic(EnvConfig(task="addition", seed=2)).eval_items()
    )


@pytest.mark.parametrize(
    ("text", "is_right"),
    [
        ("140", True),
        (" 140.", True),
        ("57 + 83 = 140", True),
        ("The answer is **140**!", True),
        ("140.0", True),
        ("60-200=140", True),
        ("- 140", True),
        ("0140", True),
        ("-140", False),
        ("\N{MINUS SIGN}140", False),
        ("140 or 141", False),
        ("1,140", False),
        ("1140", False),
        ("140.5", False),
        ("", False),
        ("one hundred and forty", False),
        ("9" * 5000, False),
    ],
)
def test_the_last_number_decides(text, is_right):
    score = Arithmetic(EnvConfig(task="addition")).score(Item.ask("?", answer="140"), text, completion(text))
    assert score == Score(reward=float(is_right), is_right=is_right)


@pytest.mark.parametrize("text", ["1240", "1,240", "It is 1,240."])
def test_a_comma_between_thousands_is_part_of_the_number(text):
    assert Arithmetic(EnvConfig(task="addition")).score(Item.ask("?", answer="1240"), text, completion(text)).is_right


def test_brevity_rewards_right_and_finished_completions_only():
    env = Arithmetic(EnvConfig(task="addition", max_token_length=24, args={"brevity": 0.2}))
    item = Item.ask("?", answer="140")
    assert env.score(item, "140", completion("140", num_tokens=6)).reward == pytest.approx(1.15)
    assert env.score(item, "7", completion("7", num_tokens=6)).reward == 0.0
    assert env.score(item, "140", completion("140", num_tokens=24, finish_reason="length")).reward == 0.5


def judged(env, given):
    """The score of a completion of the first training item, as in training."""
    (score,) = asyncio.run(ScoreRules(env, InlineScorer()).scores(env.train_item(0), [given]))
    return score


@pytest.mark.parametrize("task", ["addition", "comparison", "multiplication"])
def test_a_right_answer_that_is_cut_off_is_worth_half(task):
    env = Arithmetic(EnvConfig(task=task))
    item = env.train_item(0)
    assert env.score(item, item.answer, completion(item.answer)) == Score(reward=1.0, is_right=True)
    cut_off = completion(item.answer, finish_reason="length")
    assert env.score(item, item.answer, cut_off) == Score(reward=0.5, is_right=True)
    assert judged(env, cut_off).is_right, "its own word decides, not --env.right"
    assert env.score(item, "none", cut_off) == Score(reward=0.0, is_right=False)


def test_unknown_names_are_answered_with_the_nearest_known_one():
    with pytest.raises(ConfigError, match="did you mean 'addition'"):
        load_environment(EnvConfig(task="additon"))
    with pytest.raises(ConfigError, match="did you mean 'arithmetic'"):
        load_environment(EnvConfig(name="aritmetic"))


def test_an_error_while_scoring_is_no_score():
    @environment("test-broken-scorer")
    class Broken(Environment):
        def train_item(self, index):
            return Item.ask("?", answer="1")

        def eval_items(self):
            return []

        def score(self, item, completion_text, completion):
            if completion_text == "nan":
                return Score(reward=float("nan"), is_right=True)
            raise KeyError("no such thing")

    env = load_environment(EnvConfig(name="test-broken-scorer"))
    broken = judged(env, completion("x"))
    assert (broken.reward, broken.outcome) == (None, "raised")
    assert re.fullmatch(r"KeyError: 'no such thing', at \S*test_env_arithmetic\.py:\d+", broken.error)
    assert judged(env, completion("nan")).error == "ValueError: the reward is nan"


def test_seeds_are_63_bit_and_the_same_everywhere():
    assert stable_seed(0, "train", 1, 0) == 7095099507901934836
    assert stable_seed(1) != stable_seed("1")
    assert all(0 <= stable_seed(i) < 2**63 for i in range(1000))
    assert sorted(stable_shuffle(range(100), "x")) == list(range(100))
