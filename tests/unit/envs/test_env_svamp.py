"""SVAMP: short stories with one number as the answer."""

import asyncio
import json
from pathlib import Path

import pytest

from treadle.config.env import EnvConfig
from treadle.envs.base import Item
from treadle.envs.catalogue import load_environment
from treadle.envs.engine_client import Completion

DATA = Path(__file__).parents[2] / "data" / "svamp.json"


def opened(data, **settings):
    env = load_environment(EnvConfig(name="svamp", data=str(data), **settings))
    asyncio.run(env.open())
    return env


def test_a_row_becomes_its_story_its_question_and_a_whole_number():
    env = opened(DATA)
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
    lines.write_text("".join(json.dumps(row) + "\n" for row in json.loads(DATA.read_text())))
    assert list(opened(lines).train_items()) == list(opened(DATA).train_items())


@pytest.mark.parametrize("answer", ["many", "nan", "", None, [1], "inf"])
def test_an_answer_that_is_no_number_is_a_broken_row(tmp_path, answer):
    rows = [{"Body": f"{n} cats.", "Question": "How many?", "Answer": n} for n in range(3)]
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([*rows, {"Body": "Cats.", "Question": "How many?", "Answer": answer}], indent=1))
    env = opened(path)
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
    said = Completion([1], [-0.5], text, "stop", policy_version=0)
    score = opened(DATA).score(Item.ask("?", answer=gold), text, said)
    assert (score.reward, score.is_right) == (float(is_right), is_right)


def test_a_system_prompt_comes_first():
    roles = [message["role"] for message in opened(DATA, system_prompt="Think first.").train_item(0).messages]
    assert roles == ["system", "user"]
