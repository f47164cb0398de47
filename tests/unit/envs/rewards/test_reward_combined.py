"""Combinations: weights and normalisation do what they say."""

from __future__ import annotations

import asyncio

import pytest

from treadle.envs.rewards import CombinedReward, LengthReward, R1Reward, RewardInput, make_scorer, registry, reward
from treadle.errors import ConfigError


@reward
def given(completion: RewardInput, field: str = "a") -> float:
    """What the data row says."""
    return completion.metadata[field]


def a_and_b(weight_a, weight_b, normalization):
    parts = [
        {"type": "given", "name": "a", "weight": weight_a, "params": {"field": "a"}},
        {"type": "given", "name": "b", "weight": weight_b, "params": {"field": "b"}},
    ]
    return registry.create("combined", rewards=parts, normalization=normalization)


def rows(*pairs):
    return [RewardInput("", metadata={"a": a, "b": b} if b is not None else {"a": a}) for a, b in pairs]


def results(made, inputs):
    async def score():
        async with make_scorer("inline") as scorer:
            return await scorer.score(made, inputs)

    return asyncio.run(score())


def scores(made, inputs):
    return [result.score for result in results(made, inputs)]


@pytest.mark.parametrize(
    ("normalization", "expected"),
    [
        ("none", [2 * 1 + 0.5 * 4, 2 * 3 + 0.5 * 0, 2 * 2 + 0.5 * 8]),  # 4, 6, 8
        ("sum", [4 / 2.5, 6 / 2.5, 8 / 2.5]),
        ("minmax", [0.0, 0.5, 1.0]),
    ],
)
def test_the_arithmetic(normalization, expected):
    made = a_and_b(2.0, 0.5, normalization)
    inputs = rows((1, 4), (3, 0), (2, 8))
    assert scores(made, inputs) == pytest.approx(expected)
    assert list(made.score_group(inputs)) == pytest.approx(expected)


def test_a_negative_weight_is_a_penalty():
    assert scores(a_and_b(1.0, -2.0, "none"), rows((1, 4))) == [-7.0]


def test_minmax_of_a_group_without_differences_is_zero():
    assert scores(a_and_b(1, 1, "minmax"), rows((1, 2), (2, 1))) == [0.0, 0.0]
    assert scores(a_and_b(1, 1, "minmax"), rows((5, 5))) == [0.0]


def test_a_completion_without_a_score_is_left_out_of_minmax():
    assert scores(a_and_b(1, 1, "minmax"), rows((1, 1), (100, None), (3, 1), (2, 1))) == [0.0, None, 1.0, 0.5]


def a_if_given(completions, a):
    return a


def b_if_given(completions, b):
    return b


def may_abstain(normalization):
    return registry.create([a_if_given, b_if_given], normalization=normalization)


def test_a_completion_that_nothing_applies_to_is_left_out_of_minmax():
    made = may_abstain("minmax")
    pairs = [(4, 4), (None, None), (6, None), (5, 5)]
    inputs = [RewardInput("", metadata={"a": a, "b": b}) for a, b in pairs]
    assert scores(made, inputs) == [pytest.approx(0.5), None, 0.0, 1.0]
    assert list(made.score_group(inputs)) == [pytest.approx(0.5), 0.0, 0.0, 1.0]


def test_a_combination_within_one_leaves_out_what_it_does_not_apply_to():
    made = registry.create(
        [{"type": "combined", "params": {"rewards": [a_if_given], "normalization": "minmax"}}, b_if_given]
    )
    inputs = [RewardInput("", metadata={"a": a, "b": 1}) for a in (2, None, 4)]
    assert scores(made, inputs) == [1.0, 1.0, 2.0]


def test_a_recorded_part_that_fails_does_not_make_a_score_of_nothing():
    made = registry.create([a_if_given, registry.create("given", weight=0, field="c")])
    (result,) = results(made, [RewardInput("", metadata={"a": None})])
    assert (result.score, result.outcome) == (None, "raised")
    assert "a_if_given: returned None (not applicable)" in result.detail
    assert "given: KeyError" in result.detail


def test_zero_stays_zero_and_missing_stays_missing_under_sum():
    assert scores(a_and_b(1, 1, "sum"), rows((0, 0), (1, None))) == [0.0, None]


def test_the_weight_of_a_reward_alone_counts_too():
    assert scores(LengthReward(target=10, weight=0.5), [RewardInput("", num_tokens=10)]) == [0.5]


def test_combinations_nest():
    inner = {"type": "combined", "name": "inner", "weight": 10, "params": {
        "rewards": [{"type": "given", "name": "a", "weight": 3, "params": {"field": "a"}},
                    {"type": "given", "name": "b", "params": {"field": "b"}}], "normalization": "sum"}}  # fmt: skip
    made = registry.create([inner, {"type": "length", "params": {"target": 2}}])
    (score,) = scores(made, [RewardInput("one", metadata={"a": 2, "b": 6})])
    assert score == 10 * (3 * 2 + 6) / 4 + 0.5


def test_r1_is_the_answer_and_half_as_much_for_thinking():
    made = registry.create("r1")
    assert isinstance(made, R1Reward)
    thought, unthought = "<think>2+2</think>", ""
    inputs = [RewardInput(t + rf"\boxed{{{a}}}", answer="4") for t in (thought, unthought) for a in (4, 5)]
    assert scores(made, inputs) == [1.5, 0.5, 1.0, 0.0]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"rewards": []}, "combines nothing"),
        ({}, "combines nothing"),
        ({"rewards": ["length", "length"]}, "called 'length'"),
        ({"rewards": ["length"], "normalization": "mean"}, "mean"),
        ({"rewards": [{"type": "length", "weight": -1}], "normalization": "sum"}, "sum of its weights"),
        ({"rewards": ["length"], "normalisation": "sum"}, "normalisation"),
    ],
)
def test_what_cannot_be_combined_is_refused(settings, words):
    with pytest.raises(ConfigError, match=words):
        registry.create("combined", **settings)


def test_parts_that_are_only_recorded_make_zero():
    made = CombinedReward(rewards=(LengthReward(weight=0),))
    assert scores(made, [RewardInput("x"), RewardInput("y")]) == [0.0, 0.0]
