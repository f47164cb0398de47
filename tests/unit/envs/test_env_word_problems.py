"""GSM8K and SVAMP: their rows, their prompts, and the scores of answers."""

import asyncio
import importlib.util
import json
from pathlib import Path

import pytest

from treadle.config.env import EnvConfig
from treadle.envs.base import Item, load_environment, prepare_task
from treadle.envs.engine_client import Completion
from treadle.envs.rewards import BoxedMath, RewardInput, RewardPool
from treadle.envs.rows import RowError
from treadle.envs.scoring import ScoreRules
from treadle.envs.tasks.datasets import gold_answer
from treadle.errors import ConfigError, MissingExtra

GSM8K = Path(__file__).parents[2] / "data" / "gsm8k"


def open_gsm8k(**settings):
    env = load_environment(EnvConfig(name="gsm8k", **{"data": str(GSM8K), **settings}))
    asyncio.run(env.open())
    return env


@pytest.mark.parametrize(
    ("solution", "gold"),
    [
        ("She has 3 + 4 = <<3+4=7>>7.\n#### 7", "7"),
        ("#### 1,234,567", "1234567"),
        ("#1 is better than #2.\n#### -8 ", "-8"),
        ("#### 0.5", "0.5"),
        ("72", "72"),  # no mark: all of it
    ],
)
def test_the_gold_answer_follows_the_last_mark(solution, gold):
    assert gold_answer(solution) == gold


@pytest.mark.parametrize("solution", ["#### seven", "####", "#### 7 apples", "7 ####", "no number here"])
def test_a_gold_answer_that_is_no_number_is_refused(solution):
    with pytest.raises(RowError, match="is no number"):
        gold_answer(solution)


def test_a_row_without_a_readable_gold_answer_is_skipped_with_its_line(tmp_path):
    path = tmp_path / "rows.jsonl"
    good = [{"question": f"Q{n}?", "answer": f"#### {n}"} for n in range(10)]
    bad = [{"question": "Q?", "answer": "#### many"}, {"answer": "#### 1"}]
    path.write_text("".join(json.dumps(row) + "\n" for row in [*good, *bad]))
    broken = open_gsm8k(data=str(path)).data.broken
    assert [row.place for row in broken] == [f"{path}:11", f"{path}:12"]
    assert "'many' is no number" in broken[0].problem


def test_the_sample_has_30_rows_to_train_on_and_10_held_out():
    env = open_gsm8k()
    assert (len(env.train_items()), len(env.eval_items())) == (30, 10)
    by_answer = {item.prompt.rpartition("\n")[2]: item.answer for item in env.train_items()}
    natalia = next(question for question in by_answer if question.startswith("Natalia sold clips to 48"))
    assert by_answer[natalia] == "72"


def test_the_seed_decides_the_order_of_training_and_nothing_else():
    one, same, other = open_gsm8k(seed=1), open_gsm8k(seed=1), open_gsm8k(seed=2)
    order = [one.train_item(index).prompt for index in range(30)]
    assert order == [same.train_item(index).prompt for index in range(30)]
    assert order != [other.train_item(index).prompt for index in range(30)]
    assert one.eval_items() == other.eval_items()


def test_the_prompt_asks_to_think_names_the_budget_and_the_box():
    system, question = open_gsm8k(max_token_length=300).train_item(0).messages
    assert system["role"] == "system"
    assert all(words in system["content"] for words in ("<think>", "</think>", "300 tokens", "\\boxed{42}"))
    assert question["role"] == "user"


def test_a_system_prompt_of_ones_own_stands_in_its_place():
    assert open_gsm8k(system_prompt="Be brief.").train_item(0).messages[0]["content"] == "Be brief."
    assert [message["role"] for message in open_gsm8k(system_prompt="").train_item(0).messages] == ["user"]


def test_its_defaults_hold_where_the_user_says_nothing():
    config = load_environment(EnvConfig(name="gsm8k", max_token_length=512)).config
    assert (config.group_size, config.max_token_length, config.temperature) == (8, 512, 1.0)
    assert config.ensure_scores_are_not_same
    assert config.length_penalty
    assert config.task_name == "gsm8k"


def test_data_that_is_not_there_is_refused():
    with pytest.raises(ConfigError, match="no file or folder"):
        open_gsm8k(data="./no/such/folder")


def test_completions_are_scored_in_workers_and_counted_as_accuracy():
    env = open_gsm8k()
    item = env.train_item(0)

    def completion(text):
        return Completion([1] * 20, [-0.5] * 20, text, "stop", policy_version=0)

    async def score():
        async with RewardPool(num_workers=1) as pool:
            texts = [
                env.gold_completion(item),
                f"<think>{env.gold_completion(item)}</think> no box",
                "\\boxed{-77}",
                "",
            ]
            return await ScoreRules(env, pool).scores(item, [completion(text) for text in texts])

    scores = asyncio.run(score())
    assert [(score.reward, score.is_right) for score in scores] == [(1, True), (-1, False), (-1, False), (-1, False)]


@pytest.mark.parametrize(
    ("text", "gold", "is_right"),
    [
        (r"<think>2\cdot36</think>The answer is \boxed{72}", "72", True),
        (r"\boxed{72.00}", "72", True),
        (r"\boxed{\$72}", "72", True),
        (r"\boxed{72\text{ clips}}", "72", True),
        (r"\boxed{1{,}234}", "1234", True),
        (r"\boxed{1,234}", "1234", True),
        (r"\boxed{\frac{1}{2}}", "0.5", True),
        (r"\boxed{\frac{144}{2}}", "72", True),
        (r"\boxed{50\%}", "50", True),
        (r"\boxed{70 + 2 = 72}", "72", True),  # holds only with the gold answer as the first argument of verify
        (r"\boxed{71} no, \boxed{72}", "72", True),
        (r"\boxed{72} no, \boxed{71}", "72", False),
        (r"<think>\boxed{72}</think>", "72", False),
        (r"<think>a</think>\boxed{71}</think>\boxed{72}", "72", True),
        (r"<think>\boxed{72}", "72", True),  # it never ended its thinking: all of it is looked at
        (r"72", "72", False),
        (r"\boxed{72", "72", False),
        (r"\boxed{}", "72", False),
        (r"\boxed{\frac12}", "0.5", False),  # malformed operators are not repaired
        (r"\boxed{seventy-two}", "72", False),
        (r"\boxed{72 or 73}", "72", False),
        (r"\boxed{-72}", "72", False),
        (r"\boxed{7.2}", "72", False),
    ],
)
def test_answers_on_which_graders_disagree(text, gold, is_right):
    assert BoxedMath().score(RewardInput(text, answer=gold)) == (1.0 if is_right else -1.0)


@pytest.mark.parametrize("rewards", ["boxed_math", [{"type": "r1"}, "length"], {"type": "cosine_scaled"}])
def test_a_missing_package_is_named_with_its_extra_before_anything_starts(monkeypatch, rewards) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "math_verify" else find(name))
    environment = load_environment(EnvConfig(name="gsm8k", data="no such data"))
    environment.rewards = rewards
    with pytest.raises(MissingExtra, match="math_verify") as missing:
        prepare_task(environment)
    assert missing.value.fix == "pip install 'treadle[envs]'"


SVAMP = Path(__file__).parents[2] / "data" / "svamp.json"


def open_svamp(data, **settings):
    env = load_environment(EnvConfig(name="svamp", data=str(data), **settings))
    asyncio.run(env.open())
    return env


def test_a_row_becomes_its_story_its_question_and_a_whole_number():
    env = open_svamp(SVAMP)
    items = {item.metadata["ID"]: item for item in [*env.train_items(), *env.eval_items()]}
    assert len(items) == 20
    assert items["chal-1"].messages == (
        {
            "role": "user",
            "content": "Each pack of dvds costs 76 dollars. If there is a discount of 25 dollars on each pack. "
            "How much do you have to pay to buy each pack? Answer with only the number.",
        },
    )
    assert items["chal-1"].answer == "51"


def test_the_same_rows_one_a_line_are_the_same_items(tmp_path):
    lines = tmp_path / "rows.jsonl"
    lines.write_text("".join(json.dumps(row) + "\n" for row in json.loads(SVAMP.read_text())))
    assert list(open_svamp(lines).train_items()) == list(open_svamp(SVAMP).train_items())


@pytest.mark.parametrize("answer", ["many", "nan", "", None, [1], "inf"])
def test_an_answer_that_is_no_number_is_a_broken_row(tmp_path, answer):
    rows = [{"Body": f"{n} cats.", "Question": "How many?", "Answer": n} for n in range(3)]
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([*rows, {"Body": "Cats.", "Question": "How many?", "Answer": answer}], indent=1))
    env = open_svamp(path)
    assert [row.place for row in env.data.broken] == [f"{path}:17"]
    assert len(env.train_items()) + len(env.eval_items()) == 3


@pytest.mark.parametrize(
    ("text", "gold", "is_right"),
    [
        ("51", "51", True),
        ("51.0", "51", True),
        ("76 - 25 = 51 dollars.", "51", True),
        (r"\boxed{51}", "51", True),
        ("<think>76 and 25</think>51", "51", True),
        ("<think>51</think>", "51", False),
        ("1,051", "1051", True),
        ("0.3333333", "0.33333333", True),
        ("0.33", "0.3333", False),
        ("-51", "51", False),
        ("510", "51", False),
        ("fifty-one", "51", False),
        ("", "51", False),
        ("9" * 5000, "51", False),
        (".5", "0.5", True),
        (".5", "5", False),
        ("-.5", "-0.5", True),
        ("It is.5", "5", True),
        ("8e2", "800", True),
        ("8e2", "2", False),
        ("8e2f", "2", True),
        ("1e999999999", "51", False),
        ("1e" + "9" * 30, "51", False),
    ],
)
def test_the_last_number_behind_the_thinking_decides_by_value(text, gold, is_right):
    reply = Completion([1], [-0.5], text, "stop", policy_version=0)
    score = open_svamp(SVAMP).score(Item.ask("?", answer=gold), text, reply)
    assert (score.reward, score.is_right) == (float(is_right), is_right)


def test_a_system_prompt_comes_first():
    roles = [message["role"] for message in open_svamp(SVAMP, system_prompt="Think first.").train_item(0).messages]
    assert roles == ["system", "user"]
