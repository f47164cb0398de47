"""Train on any task of the package reasoning-gym; items are generated without end.

treadle env reasoning_gym serve --env.task basic_arithmetic --env.args '{"max_digits": 3}'
"""

from __future__ import annotations

import asyncio
import importlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import msgspec

from treadle.config.env import EnvConfig
from treadle.config.load import suggest
from treadle.envs.base import Environment, Item, stable_seed
from treadle.envs.catalogue import environment
from treadle.envs.rewards import RewardResult
from treadle.envs.rewards.reasoning_gym import BLOCK, EntryIndex, ReasoningGymReward, dataset, entry_at
from treadle.errors import ConfigError, require

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
        given = self.config.system_prompt
        return Item.ask(
            entry["question"],
            answer=_gold(entry),
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


def _gold(entry: Mapping[str, Any]) -> str:
    """The answer; some entries only have an example of a right answer."""
    answer = entry["answer"]
    for name in ("possible_answer", "example_answer", "example_correct_answer"):
        if answer is None:
            answer = entry["metadata"].get(name)
    if answer is None:
        return ""
    return answer if isinstance(answer, str) else json.dumps(answer)
