"""What each built-in reward gives, by worked examples."""

from __future__ import annotations

import math

import pytest

from treadle.envs.rewards import (
    CosineScaledReward,
    ExactMatchReward,
    FormatReward,
    JsonSchemaReward,
    LengthReward,
    ReasoningStepsReward,
    RegexReward,
    RepetitionPenaltyReward,
    RewardInput,
    ThinkFormatReward,
)
from treadle.envs.rewards.parsing import answer_text, last_box
from treadle.envs.rewards.registry import BUILT_IN, registry

HUGE = "word " * 200_000
ODD_TEXTS = [
    "",
    " ",
    "\x00",
    "𝟜𝟚 ４２ ٤٢",
    "é" * 1000,
    "{" * 5000,
    "\\boxed{" * 2000,
    "<think>" * 5000,
    "nan",
    "inf",
    "-",
    HUGE,
]


@pytest.mark.parametrize("name", sorted(set(BUILT_IN) - {"combined", "unit_tests", "judge", "reward_model"}))
@pytest.mark.parametrize("text", ODD_TEXTS, ids=lambda text: repr(text[:12]))
def test_no_text_makes_a_built_in_reward_raise(name, text):
    settings = {"regex": {"pattern": r"(\d+)", "compare_answer": True}, "json_schema": {"schema": {"type": "number"}}}
    made = registry.create(name, **settings.get(name, {}))
    assert math.isfinite(made.score(RewardInput(text, answer="42")))


@pytest.mark.parametrize(
    ("completion", "score"),
    [
        (RewardInput("", num_tokens=0), 0.0),
        (RewardInput("x", num_tokens=50), 0.5),
        (RewardInput("x", num_tokens=100), 1.0),
        (RewardInput("x", num_tokens=10**9), 1.0),
        (RewardInput("ten words are counted when nobody reported the number of tokens"), 0.11),
        (RewardInput(""), 0.0),
    ],
)
def test_length_grows_to_one_at_the_target(completion, score):
    assert LengthReward(target=100).score(completion) == pytest.approx(score)


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("<think>why</think>because", 1.0),
        ("\n <think>why</think>\n\nbecause", 1.0),
        ("<think></think>because", 0.0),
        ("<think>why</think>", 0.0),
        ("<think>why</think> \n", 0.0),
        ("hm <think>why</think>because", 0.0),
        ("<think>why", 0.0),
        ("because", 0.0),
        ("<think>a</think>b<think>c</think>d", 0.0),
        ("<think>a<think>b</think>c", 0.0),
        ("<think>a</think>b</think>", 0.0),
        ("<THINK>a</THINK>b", 0.0),
    ],
)
def test_think_format_wants_one_thought_and_then_an_answer(text, score):
    assert ThinkFormatReward().score(RewardInput(text)) == score


def test_think_format_of_a_template_that_opens_the_thought():
    opened = ThinkFormatReward(opened_in_prompt=True)
    assert opened.score(RewardInput("why</think>because")) == 1.0
    assert opened.score(RewardInput("<think>why</think>because")) == 0.0


def test_format_wants_one_tag_or_all():
    some, every = FormatReward(), FormatReward(require_all_tags=True)
    only_answer, both = RewardInput("<Answer>4</answer>"), RewardInput("<think>x</think><answer>4</answer>")
    assert [some.score(only_answer), some.score(both), every.score(only_answer), every.score(both)] == [1, 1, 0, 1]
    assert FormatReward(case_sensitive=True).score(only_answer) == 0
    assert FormatReward(preferred_tags=("sql",)).score(RewardInput("</sql><sql>")) == 0


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("", 0.0),
        ("one two", 0.0),
        ("a b c d", 0.0),
        ("a b c a b c", -0.25),
        ("so so so so so so", -0.75),
        ("So so SO so", -0.5),
    ],
)
def test_repetition_costs_the_share_of_repeated_triples(text, score):
    assert RepetitionPenaltyReward().score(RewardInput(text)) == pytest.approx(score)


@pytest.mark.parametrize(
    ("text", "num_steps"),
    [
        ("", 0),
        ("It is 4.", 0),
        ("Step 1: add\nStep 2: divide", 2),
        ("1. add\n2) divide\n- check", 3),
        ("First, add. Then divide. Finally, check.", 3),
        ("The first of them is athen.", 0),
    ],
)
def test_reasoning_steps_are_counted(text, num_steps):
    assert ReasoningStepsReward(min_steps=4).score(RewardInput(text)) == num_steps / 4


@pytest.mark.parametrize(
    ("answer", "length", "score"),
    [("4", 0, 1.0), ("4", 250, 0.5 + 0.5 * (1 + math.cos(math.pi / 4)) / 2), ("4", 1000, 0.5), ("4", 9999, 0.5),
     ("5", 0, -1.0), ("5", 500, -0.75), ("5", 1000, -0.5)],
)  # fmt: skip
def test_cosine_scaled_prefers_short_right_and_long_wrong_answers(answer, length, score):
    scaled = CosineScaledReward(max_tokens=1000)
    assert scaled.score(RewardInput(r"\boxed{4}", answer=answer, num_tokens=length)) == pytest.approx(score)


def test_exact_match_looks_behind_the_thought_and_past_white_space():
    match = ExactMatchReward()
    assert match.score(RewardInput("<think>Rome?</think>\n Paris \n", answer="Paris")) == 1
    assert match.score(RewardInput("paris", answer="Paris")) == 0
    assert match.score(RewardInput("Paris.", answer="Paris")) == 0
    assert match.score(RewardInput("Cafe\u0301", answer="Caf\u00e9")) == 1
    assert match.score(RewardInput("", answer="")) == 1


def test_regex_finds_or_compares():
    found = RegexReward(r"^Answer: \d+$")
    assert [found.score(RewardInput(text)) for text in ("Answer: 42", "<think>Answer: 42</think>no", "")] == [1, 0, 0]
    compared = RegexReward(r"answer:\s*(.+)", compare_answer=True, ignore_case=True)
    assert compared.score(RewardInput("Answer: 4\nAnswer: 5", answer="5")) == 1  # the last counts
    assert compared.score(RewardInput("Answer: 5\nAnswer: 4", answer="5")) == 0
    assert compared.score(RewardInput("5", answer="5")) == 0


SCHEMA = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ('{"age": 3}', 1),
        ('<think>{}</think>\n```json\n{"age": 3}\n```\n', 1),
        ('{"age": "3"}', 0),
        ("{}", 0),
        ('Here: {"age": 3}', 0),
        ('{"age": 3', 0),
        ('{"age": NaN}', 0),
        ("[" * 100_000, 0),
        ("", 0),
    ],
)
def test_json_schema_wants_json_that_fits(text, score):
    assert JsonSchemaReward(schema=SCHEMA).score(RewardInput(text)) == score
    assert JsonSchemaReward().score(RewardInput(text, metadata={"schema": SCHEMA})) == score


def test_the_answer_is_behind_the_last_thought():
    assert answer_text("a</think>b</think>c") == "c"
    assert answer_text("nothing thought") == "nothing thought"
    assert answer_text("x</think>") == ""


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"\boxed{1} \boxed{2}", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\boxed{3}}", "3"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{a\\}", r"a\\"),
        (r"\boxed{1} and \boxed{2", "1"),
        (r"\boxed{", None),
        (r"\boxed{}", ""),
        (r"\boxed 5", None),
        ("", None),
    ],
)
def test_the_last_box_that_closes(text, content):
    assert last_box(text) == content
