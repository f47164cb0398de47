"""Train on any task of the package reasoning-gym: items are generated without end, and scored by the task's own scorer.

treadle env reasoning_gym serve --env.task basic_arithmetic --env.args '{"max_digits": 3}'
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import msgspec

from treadle.config.env import EnvConfig
from treadle.config.load import suggest
from treadle.envs.base import Environment, Item, environment, stable_seed
from treadle.envs.rewards import RewardResult
from treadle.envs.rewards.base import Reward, RewardInput
from treadle.envs.rewards.parsing import answer_text
from treadle.errors import ConfigError, require

BLOCK = 1000  # entries of one dataset; many tasks make entry i of seed s from s + i, so seeds are this far apart

# These scorers run the answer as Python (eval, or sympy's parser, which is equivalent). They only get answers of safe
# characters: numbers, brackets, operators, names of one letter; all others are wrong anyway.
_MATRIX = r"[\d\s,\[\]()-]*"
_SUM = r"(?:[\d\s()+/.=-]|\*(?!\s*\*))*"  # without powers
_POWER = r"\*\*\s*\(?-?\d{1,2}\b\)?(?!\s*\*\*)"
# Possessive: a long answer with a wrong character at its end must not cause exponential backtracking.
_FORMULA = rf"(?:\d|\b(?:[A-Za-z]|exp|log|sin|cos|tan|asin|acos|atan|sqrt)\b|[\s()+/-]|{_POWER}|\*(?!\*))*+"
SAFE_ANSWERS: Mapping[str, re.Pattern[str]] = {
    "binary_matrix": re.compile(_MATRIX),
    "spiral_matrix": re.compile(_MATRIX),
    "n_queens": re.compile(r"[Q_\s,'\"\[\]]*"),
    "string_insertion": re.compile(r"[A-E\s,'\"\[\]]*"),
    "countdown": re.compile(_SUM),
    "puzzle24": re.compile(_SUM),
    "polynomial_multiplication": re.compile(_FORMULA),
    "simple_integration": re.compile(_FORMULA),
    "intermediate_integration": re.compile(_FORMULA),
}

_ANSWER = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)


class EntryIndex(msgspec.Struct, frozen=True):
    """Identifies an entry: the seed of its dataset, and its index there."""

    seed: int
    number: int


class ReasoningGymReward(Reward):
    """The task's own score of the last <answer>...</answer>, or 0. The entry is generated again from its index."""

    task: str
    settings_of_task: dict[str, Any] = msgspec.field(default_factory=dict)

    def warm_up(self) -> None:
        self._settings  # noqa: B018
        entry_at(self.task, self._settings, EntryIndex(0, 0))

    @functools.cached_property
    def _settings(self) -> str:
        return json.dumps(self.settings_of_task, sort_keys=True)

    def score(self, completion: RewardInput) -> float:
        entry = entry_at(self.task, self._settings, msgspec.convert(completion.metadata["place"], EntryIndex))
        if entry["question"] != completion.metadata["asked"]:
            raise ValueError(f"the task '{self.task}' makes another question of the same seed in another process")
        predicted = extract_answer(completion.text)
        if predicted is None or (self.task in SAFE_ANSWERS and SAFE_ANSWERS[self.task].fullmatch(predicted) is None):
            return 0.0
        return float(dataset(self.task, self._settings, 0).score_answer(answer=predicted, entry=entry))


def extract_answer(text: str) -> str | None:
    """The last <answer> after `</think>`, stripped.

    >>> extract_answer("It is <answer> 42 </answer>.")
    '42'
    """
    found = _ANSWER.findall(answer_text(text))
    return str(found[-1]).strip() if found else None


@functools.lru_cache(maxsize=256)
def entry_at(task: str, settings: str, place: EntryIndex) -> dict[str, Any]:
    """{"question", "answer", "metadata"}. `settings` is JSON."""
    entry: dict[str, Any] = dataset(task, settings, place.seed)[place.number]
    return entry


@functools.lru_cache(maxsize=8)
def dataset(task: str, settings: str, seed: int) -> Any:
    """The task with these settings; ConfigError if they are invalid."""
    require("reasoning-gym", "reasoning_gym")
    library = importlib.import_module("reasoning_gym")
    try:
        return library.create_dataset(task, seed=seed, size=BLOCK, **json.loads(settings))
    except (TypeError, ValueError, AssertionError) as error:
        raise ConfigError(
            f"reasoning-gym's task '{task}' does not take {settings}: {error}", fix="change --env.args"
        ) from None


NUM_HELD_OUT = 100
_NUM_BLOCKS = 100_000  # possible first blocks, chosen by the run's seed; some tasks take no seed above 2**32
_NUM_ATTEMPTS = 30  # to find a question that is not held out
_OURS = {"seed", "size"}

# Tasks of version 0.1.25 that cannot be trained on as they are, and why. Found by making 20 to 40 entries of each,
# in two processes, and scoring the right answer, those of other entries, constants and garbage.
KNOWN_BROKEN: Mapping[str, str] = {
    "boxnet": "it has no right answer to check its scorer with, and the scorer fails on JSON that is no plan",
    "codeio": "the same seed gives another question every time",
    "coin_flip": "the answer 0 gets the full score for every probability that is written as 0.…",
    "complex_arithmetic": "the answer nan gets the full score",
    "composite": "it mixes other tasks; run an environment for each instead, with weights",
    "game_of_life": "one and the same board gets 0.96 on average, and the scorer fails on JSON that is no board",
    "game_of_life_halting": "every answer but an empty one gets the full score",
    "intermediate_integration": "one right answer in ten is the integral itself, not solved",
    "isomorphic_strings": "the same seed gives another question in another process",
    "polynomial_multiplication": "the same seed gives another question in another process",
    "prime_factorization": "the scorer fails on every answer that is no list of factors",
    "propositional_logic": "one and the same conclusion gets the full score on nine items in ten",
    "puzzle24": "any sum that makes 24 gets the full score, whatever numbers were given",
    "ransom_note": "the same seed gives another question in another process",
    "rush_hour": "it has no right answer to check its scorer with",
}


@environment("reasoning_gym")
class ReasoningGym(Environment):
    """The task's own score of the last <answer>...</answer>, 0 to 1."""

    defaults: ClassVar = {"task": "basic_arithmetic", "max_token_length": 512}

    def __init__(self, config: EnvConfig) -> None:
        super().__init__(config)
        require("reasoning-gym", "reasoning_gym")
        settings = dict(config.args)
        _check_task(config.task, allow_broken=bool(settings.pop("allow_broken", False)))
        if taken := _OURS.intersection(settings):
            raise ConfigError(
                f"--env.args sets {', '.join(sorted(taken))}", fix="pass --env.seed; there is no last item"
            )
        self._settings = json.dumps(settings, sort_keys=True)
        dataset(config.task, self._settings, 0)  # raises for invalid settings
        self.rewards = ReasoningGymReward(task=config.task, settings_of_task=settings)
        self._held_out: dict[str, Item] = {}

    async def open(self) -> None:
        # In a thread, because some tasks need a third of a second per item.
        items = await asyncio.to_thread(lambda: [self._item_at(EntryIndex(0, n)) for n in range(NUM_HELD_OUT)])
        self._held_out = {item.prompt: item for item in items}

    def train_item(self, index: int) -> Item:
        """Generated from its index; a held-out question is replaced by one of a distant block."""
        block, number = divmod(index, BLOCK)
        first = 1 + stable_seed("reasoning_gym", self.config.seed) % _NUM_BLOCKS
        for attempt in range(_NUM_ATTEMPTS):
            item = self._item_at(EntryIndex((first + block + attempt * _NUM_BLOCKS) * BLOCK, number))
            if item.prompt not in self._held_out:
                return item
        raise ConfigError(
            f"the task '{self.config.task}' has hardly a question that is not held out",
            fix="let --env.args make it more varied",
        )

    def eval_items(self) -> Sequence[Item]:
        return list(self._held_out.values())

    def gold_completion(self, item: Item) -> str:
        return f"<answer>{item.answer}</answer>"

    def is_right(self, result: RewardResult) -> bool:
        """Full score only: many scorers give a part for nearly right answers."""
        return result.score is not None and result.score > 0.99

    def _item_at(self, place: EntryIndex) -> Item:
        entry = entry_at(self.config.task, self._settings, place)
        given, answer = self.config.system_prompt, entry["answer"]
        for name in ("possible_answer", "example_answer", "example_correct_answer"):
            if answer is None:  # some entries only have an example of a right answer
                answer = entry["metadata"].get(name)
        return Item.ask(
            entry["question"],
            answer="" if answer is None else answer if isinstance(answer, str) else json.dumps(answer),
            system=_SYSTEM_PROMPT if given is None else given,
            place=msgspec.to_builtins(place),
            asked=entry["question"],
        )


_SYSTEM_PROMPT = (
    "Think about the question first. Then write your final answer, and nothing but the answer, between <answer> and "
    "</answer>, in the form that the question asks for."
)


def _check_task(task: str, *, allow_broken: bool) -> None:
    known = sorted(importlib.import_module("reasoning_gym.factory").DATASETS)
    if task not in known:
        hint = suggest(task, known) or f"known tasks: {', '.join(known)}"
        raise ConfigError(f"reasoning-gym has no task '{task}'", fix=hint)
    if task in KNOWN_BROKEN and not allow_broken:
        raise ConfigError(
            f"the task '{task}' of reasoning-gym is not fit to be trained on: {KNOWN_BROKEN[task]}",
            fix="choose another with --env.task, or insist: --env.args '{\"allow_broken\": true}'",
        )
