"""Load entries of reasoning-gym tasks, and use the tasks' own scorers as a reward."""

from __future__ import annotations

import functools
import importlib
import json
import re
from collections.abc import Mapping
from typing import Any

import msgspec

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
