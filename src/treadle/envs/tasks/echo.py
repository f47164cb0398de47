"""Repeat the digit in the prompt: the smallest task, for smoke tests and as the shortest example."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from treadle.envs.base import Environment, Item, Score
from treadle.envs.catalogue import environment
from treadle.envs.engine_client import Completion


@environment("echo")
class Echo(Environment):
    """Right if the completion starts with the digit; even a model with random weights learns it."""

    defaults: ClassVar = {"max_token_length": 24}

    def train_item(self, index: int) -> Item:
        return _ask(index % 10)

    def eval_items(self) -> Sequence[Item]:
        return [_ask(digit) for digit in range(10)]

    def score(self, item: Item, completion_text: str, completion: Completion) -> Score:
        is_right = completion_text.strip().startswith(item.answer)
        return Score(reward=float(is_right), is_right=is_right)


def _ask(digit: int) -> Item:
    return Item.ask(f"Say {digit}", answer=str(digit))
