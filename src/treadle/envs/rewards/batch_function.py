"""Call reward functions that take lists, as TRL does: `def f(completions, **kwargs) -> list[float]`.

A function that has a parameter `prompts`, `completions` or `completion_ids` is called once for a group:

prompts          list of texts; of message lists where the data row has the prompt as a chat
completions      list of texts, or of [{"role": "assistant", "content": ...}] for such a chat
completion_ids   list of lists of token ids
answer, ...      every column of the data row, as a list
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from treadle.envs.rewards.base import FunctionReward, RewardInput
from treadle.errors import ConfigError

CALLED_WITH = ("prompts", "completions", "completion_ids")
_OF_TRL_ALONE = ("trainer_state", "environments", "log_extra", "log_metric")  # objects of TRL's trainer


def is_batch_function(function: Callable[..., Any]) -> bool:
    return not set(inspect.signature(function).parameters).isdisjoint(CALLED_WITH)


class BatchFunctionReward(FunctionReward):
    """A function that takes lists; it may be a coroutine function, and None in its result means "not applicable"."""

    per_group: bool = True

    def check(self) -> None:
        parameters = inspect.signature(self.function).parameters
        foreign = [name for name in self._required if name in _OF_TRL_ALONE]
        if foreign:
            raise ConfigError(
                f"reward '{self.name}' takes '{foreign[0]}', an object of TRL's trainer, which is not here",
                fix="leave it out, or give it a default",
            )
        unknown = [name for name in self.params if name not in parameters]
        if unknown and not self._takes_any:
            known = ", ".join(name for name, one in parameters.items() if one.default is not one.empty) or "none"
            raise ConfigError(f"reward '{self.name}' has no argument '{unknown[0]}'", fix=f"its settings are: {known}")

    @property
    def may_abstain(self) -> bool:
        return True

    @property
    def looks_at_groups(self) -> bool:
        return True

    def score(self, completion: RewardInput) -> float:
        return self.score_group([completion])[0]

    def score_group(self, group: Sequence[RewardInput]) -> Sequence[float]:
        columns = {**columns_of(group), **self.params}
        missing = [name for name in self._required if name not in columns]
        if missing:
            raise ValueError(f"it takes '{missing[0]}', and the data row has no such column: {', '.join(columns)}")
        if not self._takes_any:
            columns = {name: columns[name] for name in inspect.signature(self.function).parameters if name in columns}
        scores = self.function(**columns)
        if inspect.isawaitable(scores):
            scores = _finished(scores)
        scores = scores.tolist() if hasattr(scores, "tolist") else scores  # of NumPy or torch
        if not isinstance(scores, Sequence) or isinstance(scores, str):
            raise TypeError(f"it returned {scores!r:.80}, not a list with a score for each completion")
        return scores

    @property
    def _required(self) -> list[str]:
        variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        parameters = inspect.signature(self.function).parameters.values()
        return [one.name for one in parameters if one.default is one.empty and one.kind not in variable]

    @property
    def _takes_any(self) -> bool:
        parameters = inspect.signature(self.function).parameters.values()
        return any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters)


def columns_of(group: Sequence[RewardInput]) -> dict[str, list[Any]]:
    """A group as columns.

    >>> columns_of([RewardInput("4", answer="4", prompt="2 + 2?", metadata={"level": 1})])["level"]
    [1]
    """
    names = dict.fromkeys(name for one in group for name in one.metadata)
    return {
        "answer": [one.answer for one in group],
        **{name: [one.metadata.get(name) for one in group] for name in names},
        "prompts": [one.messages or one.prompt for one in group],
        "completions": [_as_chat(one.text) if one.messages else one.text for one in group],
        "completion_ids": [one.token_ids for one in group],
    }


def _as_chat(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


def _finished(coroutine: Any) -> Any:
    """The result of a coroutine, which runs in a thread: the caller's own may run an event loop already."""

    async def result() -> Any:
        return await coroutine

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, result()).result()
