"""Boxed answers: the rules of GSM8K, and a fast half that never contradicts the slow one."""

from __future__ import annotations

import itertools
import subprocess
import sys

import pytest

from treadle.envs.rewards import AccuracyReward, BoxedMath, RewardInput
from treadle.envs.rewards.parsing import compare_numbers, read_number
from treadle.envs.rewards.text import _verify

RIGHT = [
    ("5", "5"), ("5.0", "5"), ("+5", "5"), ("-5", "-5"), ("−5", "-5"), ("1,234", "1234"), ("1{,}234", "1234"),
    ("1234", "1,234"), (r"\$1,234.50", "1234.5"), ("5 kg", "5"), (r"5\text{ dollars}", "5"), ("5 hours", "5"),
    (r"50\%", "50"), (r"50\%", "0.5"), ("0.5", r"50\%"), ("1/2", "0.5"), (r"\dfrac{1}{2}", "1/2"), (".5", "0.5"),
    (r"x = 5", "5"), ("2+3", "5"), (r"\sqrt{8}", r"2\sqrt{2}"), (r"x(x+1)", "x^2+x"), ("10/2", "5"), ("05", "5"),
    ("1234567890123456789012", "1234567890123456789012"), (r"\boxed{5}", "5"), ("2 + 3 = 5", "5"),
]  # fmt: skip
WRONG = [
    ("6", "5"), ("-5", "5"), ("5.1", "5"), ("1,23", "123"), ("0.33", "1/3"), ("five", "5"), ("", "5"), (" ", "5"),
    (r"\frac12", "0.5"), ("nan", "5"), ("inf", "5"), (r"\infty", "5"), ("1/0", "1"), ("5.", "5"), ("５５", "5"),
    ("1234567890123456789013", "1234567890123456789012"), ("5{", "5"), ("\x00", "5"), (r"\frac{}{}", "5"),
]  # fmt: skip


@pytest.mark.parametrize(("boxed", "gold"), RIGHT)
def test_right_answers(boxed, gold):
    assert BoxedMath().score(RewardInput(rf"So \boxed{{{boxed}}}.", answer=gold)) == 1.0


@pytest.mark.parametrize(("boxed", "gold"), WRONG)
def test_wrong_answers(boxed, gold):
    assert BoxedMath().score(RewardInput(rf"So \boxed{{{boxed}}}.", answer=gold)) == -1.0


@pytest.mark.parametrize(
    ("text", "score"),
    [
        (r"<think>\boxed{4}</think> \boxed{5}", 1.0),
        (r"<think>\boxed{5}</think> 5", -1.0),  # only what follows the thought counts
        (r"<think>\boxed{5}</think> \boxed{4}", -1.0),
        (r"\boxed{4}, no: \boxed{5}", 1.0),
        (r"\boxed{5} or rather \boxed{4", 1.0),  # the last that closes
        (r"\boxed{5", -1.0),
        ("The final answer is $5$.", 1.0),
        ("The answer is 5.", -1.0),  # neither a box nor LaTeX
        ("5", -1.0),
        ("", -1.0),
    ],
)
def test_where_the_answer_is_looked_for(text, score):
    assert BoxedMath().score(RewardInput(text, answer="5")) == score


def test_scores_of_right_and_wrong_are_settings_and_accuracy_has_no_minus():
    wrong = RewardInput(r"\boxed{4}", answer="5")
    assert BoxedMath(right=2.0, wrong=-0.5).score(wrong) == -0.5
    assert AccuracyReward().score(wrong) == 0.0


@pytest.mark.parametrize("gold", ["", " "])
def test_a_row_without_a_gold_answer_is_an_error_not_a_low_score(gold):
    with pytest.raises(ValueError, match="gold answer"):
        BoxedMath().score(RewardInput(r"\boxed{5}", answer=gold))


FORMS = [
    "5", "5.0", "-5", "+5", "- 5", "1,234", "1234", "1{,}234", "12,345.60", "12345.6", "0.5", ".5", "1/2", "-0.5", "1",
    r"\frac{1}{2}", r"-\frac{1}{2}", r"\frac{-1}{2}", r"50\%", "50%", r"50.0\%", r"0.5\%", r"500\%", r"5\%", "0.05",
    "$5$", r"\$5", r"5\text{ kg}", r"\frac{1}{2}\text{ m}", "000", "-0", "0.3333333", "1/3", "0.33", "5.0000001",
    r"-50\%", r"100\%",
]  # fmt: skip


def test_the_fast_half_never_contradicts_the_slow_one():
    assert all(read_number(form) is not None for form in FORMS)
    num_decided = 0
    for gold, boxed in itertools.product(FORMS, FORMS):
        fast = compare_numbers(read_number(gold), read_number(boxed))
        if fast is not None:
            num_decided += 1
            assert fast == _verify(rf"\boxed{{{boxed}}}", gold), (gold, boxed)
    assert num_decided > 0.95 * len(FORMS) ** 2


@pytest.mark.parametrize(
    "text", ["", "5.", "1,23", "1/0", "1e3", "x", "5 5", "--5", "nan", "५", "²", "1" * 100, "5/", "%"]
)
def test_what_is_no_plain_number_is_left_to_the_slow_half(text):
    assert read_number(text) is None


def test_without_math_verify_the_error_names_the_extra():
    script = (
        "import sys\n"
        "sys.modules['math_verify'] = None\n"
        "from treadle.envs.rewards import BoxedMath, RewardInput\n"
        "assert BoxedMath().score(RewardInput(r'\\boxed{5}', answer='5')) == 1.0\n"  # plain numbers need nothing
        "BoxedMath().warm_up()\n"
    )
    run = subprocess.run([sys.executable, "-c", script], check=False, capture_output=True, text=True)
    assert "MissingExtra" in run.stderr
    assert "pip install 'treadle[envs]'" in run.stderr
