"""Answers scored by a reward model, a model that was trained on what people prefer.

treadle run --env.name examples/reward_model.py

REWARD_MODEL is its folder or id. REWARD_DEVICE is where it runs: cpu, or cuda:1 for example, a GPU with enough memory
left beside trainer and engine.
"""

import os
from typing import ClassVar

from treadle.envs import Environment, Item, environment

ADVICE = (
    "I cannot fall asleep.", "My flatmate never cleans up.", "I am nervous about a talk.", "I forget names.",
    "My bicycle was stolen.", "I want to drink less coffee.", "My cat scratches the sofa.", "I argue with my brother.",
    "I have no time to cook.", "I am new in this town.", "My plants keep dying.", "I put everything off.",
    "I broke a friend's cup.", "I am bored at work.", "My neighbour is loud.", "I lost my keys again.",
)  # fmt: skip
HELD_OUT = ("My phone distracts me.", "I want to read more.", "I missed a birthday.", "My back hurts from sitting.")


@environment("advice")
class Advice(Environment):
    rewards = (
        {
            "type": "reward_model",
            "params": {
                "model": os.environ.get("REWARD_MODEL", "Skywork/Skywork-Reward-V2-Qwen3-0.6B"),
                "device": os.environ.get("REWARD_DEVICE", "cpu"),
                "activation": "sigmoid",
            },
        },
        {"type": "repetition_penalty", "weight": 0.5},  # reward models like long answers, also repetitive ones
    )
    defaults: ClassVar = {"max_token_length": 128, "right": 0.9}

    def train_items(self) -> list[Item]:
        return [_ask(problem) for problem in ADVICE]

    def eval_items(self) -> list[Item]:
        return [_ask(problem) for problem in HELD_OUT]


def _ask(problem: str) -> Item:
    return Item.ask(f"{problem} What can I do? Answer in two sentences.", answer="")
