"""Any file of prompts and answers: which fields count, what the rewards see, what is refused."""

import asyncio
import json

import pytest

from treadle.config.env import EnvConfig
from treadle.envs.base import load_environment
from treadle.envs.engine_client import Completion
from treadle.envs.rewards import RewardPool
from treadle.envs.scoring import ScoreRules
from treadle.errors import ConfigError


def opened(tmp_path, rows, **settings):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text(json.dumps({**rows[0], **_other_question(rows[0])}) + "\n")
    env = load_environment(EnvConfig(name="jsonl", data=str(path), eval_data=str(held_out), **settings))
    asyncio.run(env.open())
    return env


def _other_question(row):
    field = next(iter(row))
    return {field: [{"role": "user", "content": "held out"}] if isinstance(row[field], list) else "held out"}


def scores(env, item, texts):
    async def score():
        async with RewardPool(num_workers=1) as pool:
            completions = [Completion([1], [-0.5], text, "stop", policy_version=0) for text in texts]
            return await ScoreRules(env, pool).scores(item, completions)

    return [score.reward for score in asyncio.run(score())]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "1 + 1?", "answer": "2"},
        {"question": "1 + 1?", "solution": "2"},
        {"question": "1 + 1?", "gold": 2},
        {"messages": [{"role": "user", "content": "1 + 1?"}], "answer": 2.0},
    ],
)
def test_the_usual_field_names_are_known(tmp_path, row):
    (item,) = opened(tmp_path, [row]).train_items()
    assert (item.messages, item.answer) == (({"role": "user", "content": "1 + 1?"},), "2")
    assert item.metadata == {}


def test_other_fields_are_there_for_rewards(tmp_path):
    (item,) = opened(tmp_path, [{"prompt": "?", "answer": "2", "level": 3, "tags": ["a"]}]).train_items()
    assert item.metadata == {"level": 3, "tags": ["a"]}


def test_fields_can_be_named(tmp_path):
    args = {"prompt_field": "input", "answer_field": "target"}
    (item,) = opened(tmp_path, [{"input": "1 + 1?", "target": 2, "answer": "no"}], args=args).train_items()
    assert (item.prompt, item.answer, item.metadata) == ("1 + 1?", "2", {"answer": "no"})


def test_without_a_word_about_rewards_the_answer_must_be_there_exactly(tmp_path):
    env = opened(tmp_path, [{"prompt": "Capital of France?", "answer": "Paris"}])
    texts = ["Paris", " Paris\n", "<think>Rome?</think>Paris", "paris", "It is Paris", ""]
    assert scores(env, env.train_item(0), texts) == [1, 1, 1, 0, 0, 0]
    assert env.gold_completion(env.train_item(0)) == "Paris"


def test_rewards_can_be_chosen_and_a_box_is_asked_for_where_one_is_judged(tmp_path):
    rewards = ["accuracy", {"type": "think_format", "weight": 0.5}]
    env = opened(tmp_path, [{"prompt": "1 + 1?", "answer": "2"}], args={"rewards": rewards})
    item = env.train_item(0)
    assert "\\boxed" in item.messages[0]["content"]
    assert scores(env, item, [env.gold_completion(item), "\\boxed{2}", "2"]) == [1.5, 1, 0]


def test_rows_need_no_answer_when_the_user_says_so(tmp_path):
    args = {"answer_field": "", "rewards": {"type": "regex", "params": {"pattern": "^yes"}}}
    env = opened(tmp_path, [{"prompt": "Well?"}], args=args)
    assert env.train_item(0).answer == ""
    assert scores(env, env.train_item(0), ["yes", "no"]) == [1, 0]


def test_a_system_prompt_stands_in_the_place_of_the_rows_own(tmp_path):
    chat = [{"role": "system", "content": "Be rude."}, {"role": "user", "content": "Hi"}]
    (own,) = opened(tmp_path, [{"messages": chat, "answer": "Hi"}]).train_items()
    assert list(own.messages) == chat
    (given,) = opened(tmp_path, [{"messages": chat, "answer": "Hi"}], system_prompt="Be kind.").train_items()
    assert [message["content"] for message in given.messages] == ["Be kind.", "Hi"]


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"answer": "2"}, "has none of the fields 'messages', 'prompt', 'question'"),
        ({"prompt": "?"}, "has none of the fields 'answer', 'solution', 'gold'"),
        ({"messages": [], "answer": "2"}, "do not end with something to answer"),
        ({"messages": [{"role": "assistant", "content": "2"}], "answer": "2"}, "do not end with something to answer"),
        ({"messages": ["Hi"], "answer": "2"}, "has a message that is not"),
        ({"prompt": 2**70, "answer": "2", "id": 2**70}, "cannot be sent to the processes that score"),
    ],
)
def test_a_row_that_cannot_be_asked_is_broken(tmp_path, row, problem):
    env = opened(tmp_path, [{"prompt": "good", "answer": "1"}, row])
    (broken,) = env.data.broken
    assert broken.place.endswith("rows.jsonl:2")
    assert problem in broken.problem
    assert len(env.train_items()) == 1


@pytest.mark.parametrize(
    ("args", "problem"),
    [
        ({"promt_field": "x"}, "it knows: prompt_field, answer_field, rewards"),
        ({"prompt_field": 7}, "prompt_field"),
        ({"rewards": ["exact_mach"]}, "did you mean 'exact_match'"),
        ({"rewards": []}, "combines nothing"),
    ],
)
def test_invalid_arguments_are_refused_before_the_data_is_read(args, problem):
    with pytest.raises(ConfigError, match=problem):
        load_environment(EnvConfig(name="jsonl", data="./nowhere.jsonl", args=args))


@pytest.mark.parametrize(
    ("row", "args", "has", "flag"),
    [
        ({"q": "1 + 1?", "a": "2"}, {}, "'q', 'a'", {"prompt_field": "q", "answer_field": "a"}),
        ({"prompt": "1 + 1?", "target": "2"}, {}, "'prompt', 'target'", {"answer_field": "target"}),
        (
            {"q": "1 + 1?"},
            {"answer_field": "", "rewards": ["length"]},
            "'q'",
            {"answer_field": "", "rewards": ["length"], "prompt_field": "q"},
        ),
    ],
)
def test_fields_of_other_names_are_reported_with_the_flag_that_names_them(tmp_path, row, args, has, flag):
    with pytest.raises(ConfigError) as refused:
        opened(tmp_path, [row], args=args)
    assert refused.value.message.endswith(f"; it has {has}")
    shown = refused.value.fix.partition("--env.args ")[2]
    assert json.loads(shown.strip("'")) == flag
