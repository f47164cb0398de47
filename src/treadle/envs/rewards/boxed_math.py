"""Verify mathematical answers in a box by value: 1/2, 0.5 and \\frac{1}{2} are equal."""

from __future__ import annotations

import functools
import logging
from typing import Any, ClassVar

from treadle.envs.rewards.base import Judged, Reward, RewardInput
from treadle.envs.rewards.parsing import answer_text, compare_numbers, last_box, read_number
from treadle.errors import require


class BoxedMath(Reward):
    r"""1 if the last \boxed{...} after the last </think> equals the answer, else -1: the rules of GSM8K.

    Without a box, "the answer is $...$" counts as well. Plain numbers are compared here; everything else is verified by
    the package math-verify.

    >>> BoxedMath().score(RewardInput(r"<think>...</think> It is \boxed{1,234}.", answer="1234"))
    1.0
    """

    needs: ClassVar = ("envs", "math_verify", "latex2sympy2_extended", "antlr4")

    right: float = 1.0
    wrong: float = -1.0

    def warm_up(self) -> None:
        is_equal("x", "\\frac{x}{1}")

    def score(self, completion: RewardInput) -> float:
        correct = is_right(completion.text, completion.answer)
        return Judged(self.right if correct else self.wrong, correct=correct)


class AccuracyReward(BoxedMath):
    """The same, but a wrong answer is worth 0."""

    wrong: float = 0.0


def is_right(text: str, gold: str) -> bool:
    """Whether the answer in a completion has the value of `gold`; ValueError if `gold` cannot be parsed."""
    if not gold.strip():
        raise ValueError("the gold answer is empty")
    answer = answer_text(text)
    box = last_box(answer)
    if box is None:
        return "answer" in answer.lower() and _verify(answer, gold)  # math-verify needs that word outside of a box
    return is_equal(gold, box)


def is_equal(gold: str, predicted: str) -> bool:
    """Whether two LaTeX expressions have the same value."""
    gold_number, predicted_number = _gold_number(gold), read_number(predicted)
    if gold_number is not None and predicted_number is not None:
        verdict = compare_numbers(gold_number, predicted_number)
        if verdict is not None:
            return verdict
    if not predicted.strip():
        return False
    return _verify(f"\\boxed{{{predicted}}}", gold)


@functools.lru_cache(maxsize=4096)
def _gold_number(gold: str) -> Any:
    return read_number(gold)


def _verify(predicted: str, gold: str) -> bool:
    """Verify with math-verify (slow). Without its time limit, which needs signals: the pool limits every call."""
    library = _library()
    wanted = _parsed_gold(gold)
    if not wanted:
        raise ValueError(f"the gold answer {gold!r} cannot be read as mathematics")
    found = library.parse(predicted, library.answer_rules, extraction_mode="first_match", parsing_timeout=None)
    return bool(library.verify(wanted, found, timeout_seconds=None))


@functools.lru_cache(maxsize=4096)
def _parsed_gold(gold: str) -> list[Any]:
    library = _library()
    parsed: list[Any] = library.parse(
        f"\\boxed{{{gold}}}", library.gold_rules, extraction_mode="first_match", parsing_timeout=None
    )
    return parsed


class _Library:
    """math-verify, with the rules for reading answers (strict about malformed operators) and gold ones."""

    def __init__(self) -> None:
        require(*BoxedMath.needs)
        from latex2sympy2_extended import NormalizationConfig
        from math_verify import LatexExtractionConfig, parse, verify

        # It warns, once per process, about the missing time limit; the pool has one.
        logging.getLogger("math_verify").setLevel(logging.ERROR)
        self.parse: Any = parse
        self.verify: Any = verify
        self.gold_rules = [LatexExtractionConfig()]
        self.answer_rules = [
            LatexExtractionConfig(
                # For an equation with several signs the parser takes the part after the last one.
                normalization_config=NormalizationConfig(
                    basic_latex=True, units=True, malformed_operators=False, nits=False, boxed="all"
                ),
                boxed_match_priority=0,
                try_extract_without_anchor=False,
            )
        ]


@functools.cache
def _library() -> _Library:
    return _Library()
