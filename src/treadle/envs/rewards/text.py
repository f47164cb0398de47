"""Score the text of a completion: match with an answer, a pattern or a schema; boxed mathematics; format, length.

Rewards that match look only behind the last `</think>`.
"""

from __future__ import annotations

import functools
import json
import logging
import re
import unicodedata
from typing import Any, ClassVar

import msgspec

from treadle.envs.rewards.base import Judged, Reward, RewardInput
from treadle.envs.rewards.parsing import answer_text, compare_numbers, last_box, read_number, refuse_constant, tagged
from treadle.errors import ConfigError, require

_FENCE = re.compile(r"\s*```(?:json)?\s*\n(.*)\n\s*```\s*", re.DOTALL | re.IGNORECASE)
# What begins a step: "Step 2:", "2." or "-" at the start of a line, or a word of sequence at the start of a sentence.
_STEP = re.compile(
    r"^[ \t]*(?:step[ \t]+\d+\b|\d+[.)][ \t]|[-*•][ \t])"
    r"|(?:^|[.!?]\s)[ \t]*(?:first|second|third|next|then|after that|finally|lastly)\b",
    re.IGNORECASE | re.MULTILINE,
)


class ExactMatchReward(Reward):
    """1 if the completion is the answer, apart from surrounding white space; else 0.

    >>> ExactMatchReward(ignore_case=True).score(RewardInput("paris\\n", answer="Paris"))
    1.0
    """

    ignore_case: bool = False

    def score(self, completion: RewardInput) -> float:
        return float(self._plain(answer_text(completion.text)) == self._plain(completion.answer))

    def _plain(self, text: str) -> str:
        plain = unicodedata.normalize("NFC", text).strip()  # é is one letter, however it is encoded
        return plain.casefold() if self.ignore_case else plain


class RegexReward(Reward):
    """1 if the pattern is found; with `compare_answer`, if its last match (group 1, if it has one) is the answer.

    >>> RegexReward(r"Answer: (\\w+)", compare_answer=True).score(RewardInput("Answer: yes", answer="yes"))
    1.0
    """

    pattern: str
    compare_answer: bool = False
    ignore_case: bool = False

    def check(self) -> None:
        try:
            self._compiled  # noqa: B018  # compiled once, and here
        except re.error as error:
            raise ConfigError(
                f"reward '{self.name}': {self.pattern!r} is no pattern: {error}", fix="correct it"
            ) from None

    def score(self, completion: RewardInput) -> float:
        text = answer_text(completion.text)
        if not self.compare_answer:
            return float(self._compiled.search(text) is not None)
        finds = list(self._compiled.finditer(text))
        if not finds:
            return 0.0
        found = finds[-1]
        said = found.group(1 if self._compiled.groups else 0) or ""
        return float(said.strip() == completion.answer.strip())

    @functools.cached_property
    def _compiled(self) -> re.Pattern[str]:
        return re.compile(self.pattern, re.IGNORECASE if self.ignore_case else 0)


class JsonSchemaReward(Reward):
    """1 if the completion is JSON that is valid under the schema; else 0. A ```json fence around it is removed.

    Without `schema`, the "schema" in each completion's metadata is used.
    """

    needs: ClassVar = ("envs", "jsonschema_rs")

    schema: dict[str, Any] = msgspec.field(default_factory=dict)

    def check(self) -> None:
        if self.schema:
            self._validator  # noqa: B018  # an invalid schema is refused here

    def warm_up(self) -> None:
        self.check_installed()

    def score(self, completion: RewardInput) -> float:
        try:
            said = answer_text(completion.text)
            fenced = _FENCE.fullmatch(said)
            value = json.loads(fenced.group(1) if fenced else said, parse_constant=refuse_constant)
        except (ValueError, RecursionError):
            return 0.0
        validator = self._validator if self.schema else _make_validator(completion.metadata["schema"], self.name)
        return float(validator.is_valid(value))

    @functools.cached_property
    def _validator(self) -> Any:
        return _make_validator(self.schema, self.name)


def _make_validator(schema: Any, name: str) -> Any:
    require(*JsonSchemaReward.needs)
    import jsonschema_rs

    try:
        return jsonschema_rs.validator_for(schema)
    except ValueError as error:
        raise ConfigError(f"reward '{name}': this is no JSON schema: {error}", fix="correct the schema") from None


class LengthReward(Reward):
    """Proportional to the length: 0 for an empty completion, 1 from `target` tokens on.

    >>> LengthReward(target=200).score(RewardInput("...", num_tokens=50))
    0.25
    """

    target: int = 200

    def check(self) -> None:
        if self.target < 1:
            raise ConfigError(f"reward '{self.name}' has the target {self.target}", fix="give a target of 1 or more")

    def score(self, completion: RewardInput) -> float:
        return min(1.0, completion.length / self.target)


class ThinkFormatReward(Reward):
    """1 if the completion is one non-empty `<think>...</think>` and then an answer; else 0.

    `opened_in_prompt`: the chat template writes the first `<think>` itself, so the completion starts inside.

    >>> ThinkFormatReward().score(RewardInput("<think>3 + 4</think>7"))
    1.0
    """

    opened_in_prompt: bool = False

    def score(self, completion: RewardInput) -> float:
        text = f"<think>{completion.text}" if self.opened_in_prompt else completion.text
        before, _, rest = text.partition("<think>")
        thought, closing, answer = rest.partition("</think>")
        is_one_block = bool(closing) and not any(tag in thought + answer for tag in ("<think>", "</think>"))
        return float(is_one_block and not before.strip() and bool(thought.strip()) and bool(answer.strip()))


class FormatReward(Reward):
    """1 if one of the tags (or all: `require_all_tags`) is present, opened and closed; else 0."""

    preferred_tags: tuple[str, ...] = ("think", "answer")
    require_all_tags: bool = False
    case_sensitive: bool = False

    def check(self) -> None:
        if not self.preferred_tags:
            raise ConfigError(f"reward '{self.name}' looks for no tags", fix='give preferred_tags = ["think"]')

    def score(self, completion: RewardInput) -> float:
        fold = str if self.case_sensitive else str.lower
        text = fold(completion.text)
        found = [tagged(text, fold(tag)) is not None for tag in self.preferred_tags]
        return float(all(found) if self.require_all_tags else any(found))


class RepetitionPenaltyReward(Reward):
    """From 0 (no sequence of `ngram_size` words is repeated) down to nearly `max_penalty` (always the same words).

    >>> RepetitionPenaltyReward(ngram_size=2).score(RewardInput("so so so so so"))
    -0.75
    """

    ngram_size: int = 3
    max_penalty: float = -1.0

    def check(self) -> None:
        if self.ngram_size < 1:
            raise ConfigError(f"reward '{self.name}' has the ngram_size {self.ngram_size}", fix="give 1 or more")
        if self.max_penalty > 0:
            raise ConfigError(f"reward '{self.name}' has the max_penalty {self.max_penalty}", fix="give 0 or less")

    def score(self, completion: RewardInput) -> float:
        words = completion.text.lower().split()
        ngrams = list(zip(*(words[start:] for start in range(self.ngram_size)), strict=False))
        if not ngrams:
            return 0.0
        return self.max_penalty * (1 - len(set(ngrams)) / len(ngrams))


class ReasoningStepsReward(Reward):
    """Proportional to the number of reasoning steps: 1 from `min_steps` on.

    >>> ReasoningStepsReward(min_steps=4).score(RewardInput("1. add 2 and 3\\n2. double it"))
    0.5
    """

    min_steps: int = 3

    def check(self) -> None:
        if self.min_steps < 1:
            raise ConfigError(f"reward '{self.name}' has min_steps {self.min_steps}", fix="give 1 or more")

    def score(self, completion: RewardInput) -> float:
        num_steps = sum(1 for _ in _STEP.finditer(completion.text))
        return min(1.0, num_steps / self.min_steps)


# ---- boxed mathematics


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


_gold_number = functools.lru_cache(maxsize=4096)(read_number)


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


_library = functools.cache(_Library)
