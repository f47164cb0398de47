"""The fixed work of bench/loop.py as an environment: 512 tokens per completion, and a reward that splits every group.

A model with random weights never ends an answer, and the parity of a text's length is a coin.
"""

from __future__ import annotations

from typing import ClassVar

from treadle.envs import Environment, Item, environment
from treadle.envs.rewards import RewardInput, reward

NUM_PROMPTS = 4000
PROMPT = "Write a long story number {} about a wheel, a thread and a river. "


def prompt(number: int) -> str:
    return PROMPT.format(number) * 6


@reward
def parity(completion: RewardInput) -> float:
    return float(len(completion.text) % 2)


@environment("loop_work")
class LoopWork(Environment):
    rewards = (parity,)
    defaults: ClassVar = {"group_size": 8, "max_token_length": 512}

    def train_items(self) -> list[Item]:
        return [Item.ask(prompt(number), answer="") for number in range(NUM_PROMPTS)]

    def eval_items(self) -> list[Item]:
        return [Item.ask("Write.", answer="")]
