"""How to write a single-turn environment: what to ask, and what an answer is worth.

    @environment("capitals")
    class Capitals(Environment):
        def train_item(self, index: int) -> Item:
            return _ask(*TRAIN[index % len(TRAIN)])

        def eval_items(self) -> Sequence[Item]:
            return [_ask(country, capital) for country, capital in HELD_OUT]

        def score(self, item: Item, completion_text: str, completion: Completion) -> Score:
            is_right = item.answer in completion_text
            return Score(reward=float(is_right), is_right=is_right)

    def _ask(country: str, capital: str) -> Item:
        return Item.ask(f"What is the capital of {country}?", answer=capital)

Everything else (sampling, delivery, evaluation, restarts) is the runner's.
"""

from __future__ import annotations

import importlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeVar

from treadle.config.load import suggest
from treadle.config.schema import EnvConfig
from treadle.envs.engine_client import Completion
from treadle.errors import ConfigError
from treadle.log import get_logger

log = get_logger("env")

Message = dict[str, Any]  # {"role": "user", "content": "..."}


@dataclass(frozen=True)
class Item:
    """One prompt as chat messages, and the answer that is right."""

    messages: tuple[Message, ...]
    answer: str

    @classmethod
    def ask(cls, question: str, *, answer: str) -> Self:
        return cls(messages=({"role": "user", "content": question},), answer=answer)

    @property
    def prompt(self) -> str:
        """The prompt as a person reads it."""
        return "\n".join(str(message["content"]) for message in self.messages)


@dataclass(frozen=True)
class Score:
    """`reward` is trained on, `is_right` is counted as accuracy; `error` says why scoring itself failed."""

    reward: float
    is_right: bool
    error: str = ""


class Environment(ABC):
    """A task. It must give the same item for the same index and `config.seed`, in every process."""

    def __init__(self, config: EnvConfig) -> None:
        self.config = config

    @abstractmethod
    def train_item(self, index: int) -> Item:
        """The prompt with this ordinal; indexes never end, so go round when the data does."""

    @abstractmethod
    def eval_items(self) -> Sequence[Item]:
        """Held-out prompts, always the same ones in the same order, whatever the seed."""

    @abstractmethod
    def score(self, item: Item, completion_text: str, completion: Completion) -> Score:
        """What this completion is worth."""


E = TypeVar("E", bound=type[Environment])

_REGISTRY: dict[str, type[Environment]] = {}
_BUILT_IN = {"arithmetic": "treadle.envs.arithmetic", "echo": "treadle.envs.echo"}


def environment(name: str) -> Callable[[E], E]:
    """Class decorator: `treadle env NAME` finds the class under this name."""

    def register(cls: E) -> E:
        if _REGISTRY.setdefault(name, cls) is not cls:
            raise ConfigError(f"two environments are called '{name}'", fix="rename one of them")
        return cls

    return register


def load_environment(config: EnvConfig) -> Environment:
    if config.name in _BUILT_IN:
        importlib.import_module(_BUILT_IN[config.name])
    if config.name not in _REGISTRY:
        known = sorted({*_BUILT_IN, *_REGISTRY})
        hint = suggest(config.name, known) or f"known environments: {', '.join(known)}"
        raise ConfigError(f"unknown environment '{config.name}'", fix=hint)
    return _REGISTRY[config.name](config)


def score_safely(environment: Environment, item: Item, completion: Completion) -> Score:
    """Score one completion; an error in its code is recorded and costs the reward, not the run."""
    try:
        score = environment.score(item, completion.text, completion)
        if not math.isfinite(score.reward):
            raise ValueError(f"the reward is {score.reward}")
    except Exception as error:  # the border to code that a user writes
        log.error("score_failed", exc_info=True, prompt=item.prompt, completion=completion.text)
        return Score(reward=0.0, is_right=False, error=f"{type(error).__name__}: {error}")
    return score
