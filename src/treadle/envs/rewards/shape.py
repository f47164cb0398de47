"""Rewards for how a completion is written, whatever it says."""

from __future__ import annotations

import re

from treadle.envs.rewards.base import Reward, RewardInput
from treadle.envs.rewards.passages import tagged
from treadle.errors import ConfigError


class LengthReward(Reward):
    """Longer completions are worth more: 0 for an empty one, 1 from `target` tokens on.

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
    """1 when the completion is one `<think>...</think>` with something in it, and then an answer; else 0.

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
    """1 when one of the tags (or all: `require_all_tags`) is there, opened and closed; else 0."""

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
    """From 0 (no sequence of `ngram_size` words comes twice) down to nearly `max_penalty` (always the same words).

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


# What begins a step: "Step 2:", "2." or "-" at the start of a line, or a word of sequence at the start of a sentence.
_STEP = re.compile(
    r"^[ \t]*(?:step[ \t]+\d+\b|\d+[.)][ \t]|[-*•][ \t])"
    r"|(?:^|[.!?]\s)[ \t]*(?:first|second|third|next|then|after that|finally|lastly)\b",
    re.IGNORECASE | re.MULTILINE,
)


class ReasoningStepsReward(Reward):
    """How many steps the completion is divided into: 1 from `min_steps` on.

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
