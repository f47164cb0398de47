"""Reward functions in TRL's style: lists in, a list out, called once for a group."""

from __future__ import annotations

import asyncio
import json

import pytest

from treadle.config.env import EnvConfig
from treadle.envs.base import Item, load_environment
from treadle.envs.engine_client import Completion
from treadle.envs.rewards import InlineScorer, RewardInput, RewardPool, registry, reward
from treadle.envs.scoring import ScoreRules
from treadle.errors import ConfigError


def lengths(completions, **kwargs):
    return [float(len(text)) for text in completions]


async def waits(completions, answer, **kwargs):
    await asyncio.sleep(0)
    return [float(text == gold) for text, gold in zip(completions, answer, strict=True)]


def every_second(prompts, completions):
    """Knows nothing of the columns, and is applicable to every second completion."""
    return [None if place % 2 else 1.0 for place in range(len(completions))]


def nothing(completions, **kwargs):
    return [None] * len(completions)


def score(rewards, inputs, scorer=None):
    async def scored():
        async with scorer or InlineScorer() as opened:
            return await opened.score(registry.create(rewards), inputs)

    return asyncio.run(scored())


INPUTS = [RewardInput("4", answer="4"), RewardInput("four", answer="4")]


def test_several_functions_are_summed_with_their_weights():
    weighted = [registry.create(lengths, weight=0.5), waits]
    assert [result.score for result in score(weighted, INPUTS)] == [1.5, 2.0]


def test_workers_call_functions_and_coroutine_functions():
    results = score([lengths, waits], INPUTS, RewardPool(num_workers=1))
    assert [result.parts for result in results] == [{"lengths": 1.0, "waits": 1.0}, {"lengths": 4.0, "waits": 0.0}]


def test_none_is_not_applicable_and_adds_nothing():
    first, second = score([lengths, every_second], INPUTS)
    assert (first.score, first.parts) == (2.0, {"lengths": 1.0, "every_second": 1.0})
    assert (second.score, second.parts) == (4.0, {"lengths": 4.0, "every_second": None})
    assert {first.outcome, second.outcome} == {"scored"}


def test_a_completion_that_no_reward_applies_to_has_no_score():
    for result in score([nothing], INPUTS):
        assert (result.score, result.outcome) == (None, "raised")
        assert "not applicable" in result.detail


def test_none_from_a_function_of_one_completion_stays_a_mistake():
    def none(completion):
        return None

    assert [result.outcome for result in score([none], INPUTS)] == ["raised", "raised"]


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (0.5, "it returned 0.5, not a list"),
        ([1.0], "returned 1 scores for 2 completions"),
        ([float("nan")] * 2, "not a finite number"),
        (["good", "bad"], "not a finite number"),
    ],
)
def test_what_is_no_list_of_scores_says_so(returned, message):
    def f(completions, **kwargs):
        return returned

    (result, _) = score([f], INPUTS)
    assert (result.outcome, message in result.detail) == ("raised", True), result.detail


def test_arrays_are_lists_of_scores_too():
    numpy = pytest.importorskip("numpy")

    def array(completions, **kwargs):
        return numpy.ones(len(completions), dtype="float32")

    assert [result.score for result in score([array], INPUTS)] == [1.0, 1.0]


def test_a_missing_column_is_named():
    def graded(completions, solution):
        return [0.0 for _ in completions]

    (result, _) = score([graded], [RewardInput("4", metadata={"level": 1})] * 2)
    assert "it takes 'solution', and the data row has no such column: answer, level" in result.detail


def test_an_object_of_the_trainer_of_trl_is_refused():
    def stateful(completions, trainer_state, **kwargs):
        return []

    with pytest.raises(ConfigError, match="'trainer_state', an object of TRL's trainer"):
        registry.create(stateful)


def test_settings_are_arguments_with_defaults():
    @reward
    def below(completions, limit=3, **kwargs):
        return [float(len(text) < limit) for text in completions]

    assert [result.score for result in score([below], INPUTS)] == [1.0, 0.0]
    assert [result.score for result in score([registry.create("below", limit=9)], INPUTS)] == [1.0, 1.0]

    def closed(completions, limit=3):
        return []

    with pytest.raises(ConfigError, match="has no argument 'size'") as refused:
        registry.create(closed, size=9)
    assert refused.value.fix == "its settings are: limit"


SEEN = """
import json

def seen(prompts, completions, completion_ids, **columns):
    with open(FILE, "w") as file:
        json.dump([prompts, completions, completion_ids, columns], file)
    return [0.0 for _ in completions]
"""
CHAT = [{"role": "user", "content": "2 + 2?"}]


@pytest.mark.parametrize(
    ("prompt", "completion"), [("2 + 2?", "4"), (CHAT, [{"role": "assistant", "content": "4"}])], ids=["text", "chat"]
)
def test_a_function_sees_the_row_as_the_data_has_it(tmp_path, prompt, completion):
    (tmp_path / "mine.py").write_text(f"FILE = {str(tmp_path / 'seen.json')!r}\n{SEEN}")
    rows = [{"prompt": prompt, "target": 4, "level": "easy"}, {"prompt": f"{prompt}!", "target": 5, "level": "easy"}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = EnvConfig(name="jsonl", data=str(tmp_path / "rows.jsonl"), rewards=f"{tmp_path}/mine.py:seen")
    environment = load_environment(config)
    environment.prepare()
    items = [*environment.train_items(), *environment.eval_items()]
    item = next(item for item in items if item.prompt == "2 + 2?")

    async def scored():
        async with RewardPool(num_workers=1) as pool:
            reply = Completion([7, 8], [-0.5, -0.5], "4", "stop", policy_version=0)
            return await ScoreRules(environment, pool).scores(item, [reply, reply])

    assert [score.reward for score in asyncio.run(scored())] == [0.0, 0.0]
    prompts, completions, ids, columns = json.loads((tmp_path / "seen.json").read_text())
    assert (prompts, completions, ids) == ([prompt] * 2, [completion] * 2, [[7, 8]] * 2)
    assert columns == {"answer": ["", ""], "target": [4, 4], "level": ["easy", "easy"]}


def test_the_answer_is_there_under_the_name_of_its_column(tmp_path):
    (tmp_path / "mine.py").write_text("def f(completions, solution):\n    return [0.0 for _ in completions]\n")
    (tmp_path / "rows.jsonl").write_text('{"question": "1 + 1?", "solution": 2}\n{"question": "?", "solution": 3}\n')
    environment = load_environment(
        EnvConfig(name="jsonl", data=str(tmp_path / "rows.jsonl"), rewards=(f"{tmp_path}/mine.py:f",))
    )
    environment.prepare()
    (item,) = environment.train_items()
    assert item.metadata == {"solution": int(item.answer)}


def test_items_of_messages_are_chats_and_those_of_a_text_are_not():
    assert Item(messages=tuple(CHAT), answer="4").is_chat
    assert not Item.ask("2 + 2?", answer="4").is_chat
