"""Try answers on a task without a model: the right one must score, and wrong ones must not.

A task of several turns is run with a scripted engine that gives the same reply in every turn.
"""

from __future__ import annotations

import asyncio
import re
import statistics
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, cast

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from treadle.envs.base import Environment, Item, Score, stable_seed
from treadle.envs.chat import RolloutSampling
from treadle.envs.chat_format import ChatTokenizer
from treadle.envs.engine_client import Completion, EngineResult
from treadle.envs.engine_pool import InferenceClient
from treadle.envs.rollout import EnvContext, roll_one
from treadle.envs.scoring import ScoreRules
from treadle.formatting import Finding, Verdict

Kind = Literal["right", "empty", "constant", "another", "every", "garbage", "unicode", "very long"]

ROLLOUT_LIMIT_S = 10.0
_NUM_LETTERS = 64
_LETTERS = "abcdefghijklmnopqrstuvwxyz     ,.;:-(){}[]<>/\\\"'`$%&*_=+"  # no digits: a random number could be right
_MOST_WORDS = 20_000
_FILLERS = ("word", "any")  # no letter is in both
NUM_OTHERS = 20  # answers of other items that are given together with the right one
_SURROGATES = range(0xD800, 0xE000)  # no text has one of them by itself
# Errors of code that is wrong whatever the answer is, and the location at the end of a described error.
_CODE_ERROR = re.compile(r"\b(TypeError|AttributeError|NameError|UnboundLocalError|ImportError|ModuleNotFoundError)\b")
_PLACE = re.compile(r", at (\S[^;]*:\d+)")


@dataclass(frozen=True)
class TriedAnswer:
    """One answer to one item, and its score."""

    kind: Kind
    item: Item
    text: str
    score: Score
    seconds: float  # of scoring it; for several turns, its share of all rollouts


class AnswerTester:
    """`await tester.try_answers(0)`: tries every kind of answer on an item, scored as in training."""

    def __init__(self, environment: Environment, judge: ScoreRules, items: Sequence[Item]) -> None:
        self._environment = environment
        self._judge = judge
        self._constant = Counter(map(environment.gold_completion, items)).most_common(1)[0][0]
        self._items = items
        self._hung: Score | None = None  # set by the first rollout that does not end; no others are tried

    async def try_answers(self, place: int) -> list[TriedAnswer]:
        item = self._items[place]
        answers = self._answers(place)
        completions = [_completion(text) for text in answers.values()]
        started = time.perf_counter()
        if self._environment.has_turns:
            scores = [await self._run_turns(item, text) for text in answers.values()]
        else:
            scores = await self._judge.scores(item, completions)
        share_s = (time.perf_counter() - started) / len(answers)
        return [
            TriedAnswer(kind, item, text, score, score.seconds or share_s)
            for (kind, text), score in zip(answers.items(), scores, strict=True)
        ]

    def _answers(self, place: int) -> dict[Kind, str]:
        item = self._items[place]
        letters = (_LETTERS[stable_seed("garbage", place, n) % len(_LETTERS)] for n in range(_NUM_LETTERS))
        codes = (stable_seed("unicode", place, n) % 0x110000 for n in range(_NUM_LETTERS))
        own = item.answer.strip().casefold()
        filler = next(word for word in _FILLERS if not own or own not in word)
        answers: dict[Kind, str] = {
            "right": self._environment.gold_completion(item),
            "empty": "",
            "constant": self._constant,
            "garbage": "".join(letters),
            "unicode": "".join(chr(code) for code in codes if code not in _SURROGATES),
            # As long as a completion may get, one word per token.
            "very long": f"{filler} " * min(_MOST_WORDS, self._environment.config.max_token_length),
        }
        another = next((other for other in self._items[place + 1 :] if other.answer != item.answer), None)
        if another is not None:
            answers["another"] = self._environment.gold_completion(another)
        others = list(dict.fromkeys(other.answer for other in self._items if other.answer != item.answer))[:NUM_OTHERS]
        if len(others) > 1 and item.answer:
            half = len(others) // 2
            answers["every"] = "\n".join([*others[:half], item.answer, *others[half:]])
        return answers

    async def _run_turns(self, item: Item, text: str) -> Score:
        if self._hung is not None:
            return self._hung
        script = cast(InferenceClient, _ScriptedEngine(text))  # a rollout of several turns only calls `generate`
        context = EnvContext(self._environment, script, _byte_tokenizer(), self._judge)
        sampling = RolloutSampling(max_tokens=self._environment.config.max_token_length, temperature=1.0)
        try:
            async with asyncio.timeout(ROLLOUT_LIMIT_S):
                rollout = await roll_one(context, item, sampling)
        except TimeoutError:
            error = f"rollout() of '{item.prompt[-60:]}' had not returned after {ROLLOUT_LIMIT_S:g} s"
            self._hung = Score(None, is_right=False, outcome="timed_out", error=error)
            return self._hung
        return rollout.score


@dataclass(frozen=True)
class _ScriptedEngine:
    """Replaces the engine: always generates the same text."""

    text: str

    async def generate(self, prompt_token_ids: Sequence[int], **_: object) -> EngineResult:
        await asyncio.sleep(0)  # so that an endless rollout can be cancelled
        return EngineResult([_completion(self.text)], seconds=0.0)


def _completion(text: str) -> Completion:
    """A completion with one token per word: there is no tokenizer, and few rewards count tokens."""
    num_tokens = max(1, len(text.split()))
    return Completion([0] * num_tokens, [0.0] * num_tokens, text, finish_reason="stop", policy_version=0)


def _byte_tokenizer() -> ChatTokenizer:
    """One token per byte and no chat template: the prompts are not used."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: place for place, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return ChatTokenizer(tokenizer, None, {})


@dataclass(frozen=True)
class WrongAnswerCheck:
    """A kind of answer that must not score, and the share of items on which it may do so by chance."""

    name: str
    warn_above: float
    fail_above: float
    remedy: str
    min_items: int = 1  # with fewer, the share is meaningless


WRONG_ANSWER_CHECKS: Mapping[Kind, WrongAnswerCheck] = {
    "empty": WrongAnswerCheck("empty answers", 0, 0.05, "give nothing for an answer without content"),
    "garbage": WrongAnswerCheck("garbage", 0, 0.05, "find out what the reward sees in it"),
    "unicode": WrongAnswerCheck("random Unicode", 0, 0.05, "find out what the reward sees in it"),
    "very long": WrongAnswerCheck("very long answers", 0, 0.05, "length alone must not pay"),
    "constant": WrongAnswerCheck(
        "always the same answer", 0.2, 0.5, "balance the answers: it would learn this one by heart", 10
    ),
    "every": WrongAnswerCheck("many answers at once", 0.05, 1.0, "look at one answer: the last, or the whole text", 3),
    "another": WrongAnswerCheck(
        "another item's answer", 0.05, 1.0, "see whether the reward compares with the item's own answer"
    ),
}


def check_answers(environment: Environment, answers: Sequence[TriedAnswer]) -> list[Finding]:
    right_answers = {id(answer.item): answer for answer in answers if answer.kind == "right"}
    findings = [_check_right(environment, list(right_answers.values()))]
    for kind, check in WRONG_ANSWER_CHECKS.items():
        scored = [answer for answer in answers if answer.kind == kind and answer.score.reward is not None]
        if scored:
            findings.append(_check_wrong_answers(check, scored, right_answers))
    times = [answer.seconds for answer in answers]
    found = f"{1000 * statistics.mean(times):.1f} ms an answer, {1000 * max(times):.1f} ms at most"
    asks_server = any(answer.score.metrics for answer in answers)  # then that limit does not apply
    if max(times) > environment.config.reward_timeout_s / 2 and not asks_server:
        remedy = "make it quicker, or raise --env.reward-timeout-s"
        return [*findings, _check_failures(answers), Finding("scoring time", "warning", found, remedy)]
    return [*findings, _check_failures(answers), Finding("scoring time", "ok", found)]


def is_rewarded(answer: TriedAnswer, right_answer: TriedAnswer) -> bool:
    """Whether an answer is right, or gets at least half the reward of the right one."""
    if answer.score.is_right or not right_answer.score.is_right:
        return answer.score.is_right
    reward, full = answer.score.reward or 0.0, right_answer.score.reward or 0.0
    return reward >= (full / 2 if full > 0 else full)


def _check_right(environment: Environment, right_answers: Sequence[TriedAnswer]) -> Finding:
    name = "right answers"
    if not any(answer.item.answer for answer in right_answers):
        return Finding(name, "warning", "the items have no answers, so none was tried")
    missed = [answer for answer in right_answers if answer.score.reward is not None and not answer.score.is_right]
    num_unscored = sum(answer.score.reward is None for answer in right_answers)
    if num_unscored and not missed:
        found = f"{num_unscored:,} of {len(right_answers):,} could not be scored"
        return Finding(name, "problem", found, "see what is said of scoring, below")
    if not missed:
        return Finding(
            name, "ok", f"{len(right_answers):,} of {len(right_answers):,} are right, worth {_worth(right_answers)}"
        )
    found = f"{len(missed):,} of {len(right_answers):,} are judged wrong: {_example(missed[0])}"
    is_default = type(environment).gold_completion is Environment.gold_completion
    if environment.has_turns and is_default:  # perhaps no single text can be right in every turn
        return Finding(name, "warning", found, "if one text can be right in every turn, let gold_completion return it")
    remedy = (
        f"correct the rewards or the rows; let gold_completion write the answer as the task asks for it; or, where "
        f"less than {environment.config.right:g} is right, give --env.right"
    )
    return Finding(name, "problem", found, remedy)


def _check_wrong_answers(
    check: WrongAnswerCheck, answers: Sequence[TriedAnswer], right_answers: Mapping[int, TriedAnswer]
) -> Finding:
    hits = [answer for answer in answers if is_rewarded(answer, right_answers[id(answer.item)])]
    found = f"worth {_worth(answers)}"
    if not hits:
        return Finding(check.name, "ok", found)
    found += f"; pays on {len(hits):,} of {len(answers):,} items"
    share = len(hits) / len(answers)
    if share <= check.warn_above or len(answers) < check.min_items:
        return Finding(check.name, "ok", found)
    verdict: Verdict = "problem" if share > check.fail_above else "warning"
    return Finding(check.name, verdict, f"{found}: {_example(hits[0])}", check.remedy)


def _check_failures(answers: Sequence[TriedAnswer]) -> Finding:
    failed = [answer for answer in answers if answer.score.reward is None]
    if not failed:
        return Finding("scoring", "ok", f"{len(answers):,} answers scored, no failure")
    outcomes = Counter(answer.score.outcome for answer in failed)
    counted = ", ".join(f"{outcome} ({count:,} times)" for outcome, count in outcomes.items())
    first = failed[0]
    found = f"{counted}; first the {first.kind} answer {first.text!r:.60}: {first.score.error}"
    remedy = "score every text: what cannot be read is wrong, not an error"
    if _CODE_ERROR.search(first.score.error):
        remedy = fix_for_error(first.score.error)
    elif first.score.outcome == "timed_out":
        remedy = "make it quicker, or raise --env.reward-timeout-s"
    elif first.score.outcome == "out_of_memory":
        remedy = "let it take less, or raise --env.reward-memory-mb"
    elif first.score.outcome == "judge_failed":
        remedy = "see whether the judge's server runs, and whether its model writes the last line that is asked for"
    elif set(outcomes) == {"too_long"}:  # completions of the policy may be shorter than those tried here
        return Finding("scoring", "warning", found, "lower --env.max-token-length, or raise max_length of the reward")
    return Finding("scoring", "problem", found, remedy)


def fix_for_error(error: str) -> str:
    """The remedy for an error of the code itself; the error ends with its location, if that is known."""
    place = _PLACE.search(error)
    return f"its code failed at {place.group(1)}" if place else "its code failed: correct it"


def _worth(answers: Sequence[TriedAnswer]) -> str:
    rewards = [answer.score.reward for answer in answers if answer.score.reward is not None]
    if not rewards:
        return "nothing"
    low, high = min(rewards), max(rewards)
    return f"{low:g}" if low == high else f"{low:g} to {high:g}"


def _example(answer: TriedAnswer) -> str:
    """The answer and the end of the prompt, which has the question."""
    question = " ".join(answer.item.prompt.split())[-100:]
    return f"{answer.text!r:.80} to '{question}'"
