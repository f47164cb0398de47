"""Answers to try on a task without a model: the right one, and those that must not pay.

A task of several turns is tried with a script in the place of the model, which says the same in every turn.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, cast

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from treadle.envs.base import Environment, Item, Score
from treadle.envs.chat import Sampling
from treadle.envs.engine_client import Completion, Engine, Generation
from treadle.envs.rollout import EnvContext, roll_one
from treadle.envs.scoring import Judge
from treadle.envs.seeds import stable_seed
from treadle.envs.tokens import ChatTokenizer

Kind = Literal["right", "empty", "constant", "another", "every", "garbage", "unicode", "very long"]

ROLLOUT_LIMIT_S = 10.0
_NUM_LETTERS = 64
_MOST_WORDS = 20_000
_FILLERS = ("word", "any")  # no letter is in both
NUM_OTHERS = 20  # answers of other items that are said together with the right one
_SURROGATES = range(0xD800, 0xE000)  # no text has one of them by itself


@dataclass(frozen=True)
class Trial:
    """One answer to one item, and what it was worth."""

    kind: Kind
    item: Item
    text: str
    score: Score
    seconds: float  # of scoring it; of a rollout of several turns, its share of all


class Trials:
    """`await trials.on(item)`: every kind of answer, scored as in training."""

    def __init__(self, environment: Environment, judge: Judge, items: Sequence[Item]) -> None:
        self._environment = environment
        self._judge = judge
        self._constant = Counter(map(environment.gold_completion, items)).most_common(1)[0][0]
        self._items = items
        self._hung: Score | None = None  # one rollout that does not end is enough to know

    async def on(self, place: int) -> list[Trial]:
        """All trials of the item with this place among the items."""
        item = self._items[place]
        answers = self._answers(place)
        completions = [_completion(text) for text in answers.values()]
        started = time.perf_counter()
        if self._environment.has_turns:
            scores = [await self._play(item, text) for text in answers.values()]
        else:
            scores = await self._judge.scores(item, completions)
        share_s = (time.perf_counter() - started) / len(answers)
        return [
            Trial(kind, item, text, score, score.seconds or share_s)
            for (kind, text), score in zip(answers.items(), scores, strict=True)
        ]

    def _answers(self, place: int) -> dict[Kind, str]:
        item = self._items[place]
        answers: dict[Kind, str] = {
            "right": self._environment.gold_completion(item),
            "empty": "",
            "constant": self._constant,
            "garbage": _letters(place, "abcdefghijklmnopqrstuvwxyz     ,.;:-(){}[]<>/\\\"'`$%&*_=+"),
            "unicode": _unicode(place),
            "very long": _very_long(item, self._environment.config.max_token_length),
        }
        another = next((other for other in self._items[place + 1 :] if other.answer != item.answer), None)
        if another is not None:
            answers["another"] = self._environment.gold_completion(another)
        others = list(dict.fromkeys(other.answer for other in self._items if other.answer != item.answer))[:NUM_OTHERS]
        if len(others) > 1 and item.answer:
            half = len(others) // 2
            answers["every"] = "\n".join([*others[:half], item.answer, *others[half:]])
        return answers

    async def _play(self, item: Item, text: str) -> Score:
        if self._hung is not None:
            return self._hung
        script = cast(Engine, _Script(text))  # a rollout of several turns asks it for nothing but `generate`
        context = EnvContext(self._environment, script, _byte_tokenizer(), self._judge)
        sampling = Sampling(max_tokens=self._environment.config.max_token_length, temperature=1.0)
        try:
            async with asyncio.timeout(ROLLOUT_LIMIT_S):
                rollout = await roll_one(context, item, sampling)
        except TimeoutError:
            error = f"rollout() of '{item.prompt[-60:]}' had not returned after {ROLLOUT_LIMIT_S:g} s"
            self._hung = Score(None, is_right=False, outcome="timed_out", error=error)
            return self._hung
        return rollout.score


class _Script:
    """In the place of the engine: says the same text whenever it is asked."""

    def __init__(self, text: str) -> None:
        self._text = text

    async def generate(self, prompt_token_ids: Sequence[int], **_: object) -> Generation:
        await asyncio.sleep(0)  # or a rollout that never ends could not be ended
        return Generation([_completion(self._text)], seconds=0.0)


def _very_long(item: Item, max_tokens: int) -> str:
    """As long as a completion may get, a word a token. The right answer is not in it: only its length could pay."""
    answer = item.answer.strip().casefold()
    filler = next(word for word in _FILLERS if not answer or answer not in word)
    return f"{filler} " * min(_MOST_WORDS, max_tokens)


def _completion(text: str) -> Completion:
    """A token is a word here: there is no tokenizer, and few rewards count."""
    num_tokens = max(1, len(text.split()))
    return Completion([0] * num_tokens, [0.0] * num_tokens, text, finish_reason="stop", policy_version=0)


def _byte_tokenizer() -> ChatTokenizer:
    """One token a byte, and no chat template: enough for prompts that nobody reads."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: place for place, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return ChatTokenizer(tokenizer, None, {})


def _letters(place: int, alphabet: str) -> str:
    """No digits: a number by chance would be right by chance."""
    return "".join(alphabet[stable_seed("garbage", place, n) % len(alphabet)] for n in range(_NUM_LETTERS))


def _unicode(place: int) -> str:
    codes = (stable_seed("unicode", place, n) % 0x110000 for n in range(_NUM_LETTERS))
    return "".join(chr(code) for code in codes if code not in _SURROGATES)
