"""Answers without a right one, scored by another model: explain a word to a child.

treadle engine --model Qwen/Qwen3-4B --port 9100      the judge; any server that speaks OpenAI's protocol will do
treadle run --env.name examples/judge.py

JUDGE_URL, JUDGE_MODEL and JUDGE_MODE (rubric, pairwise) choose another one. Its key, if it needs one, is expected in
TREADLE_JUDGE_KEY.
"""

import os
from typing import ClassVar

from treadle.envs import Environment, Item, environment

RUBRIC = """\
The answer explains the word in TASK to a child of eight.
- It is right.
- It has one or two short sentences.
- It has no word that the child would have to look up.
- It gives an example from the child's everyday life."""

TRAIN = (
    "gravity", "echo", "rust", "shadow", "erosion", "magnet", "tide", "battery", "pollen", "fossil", "vaccine", "tax",
    "rumour", "promise", "election", "loan", "habit", "irony", "budget", "museum", "orchestra", "compass", "lever",
    "friction", "molecule", "insect", "desert", "glacier", "volcano", "planet", "recipe", "alphabet",
)  # fmt: skip
HELD_OUT = ("evaporation", "satellite", "bacteria", "courage", "passport", "harvest", "melody", "thermometer")

JUDGE = {
    "type": "judge",
    "params": {
        "url": os.environ.get("JUDGE_URL", "http://127.0.0.1:9100"),
        "model": os.environ.get("JUDGE_MODEL", "Qwen/Qwen3-4B"),
        "mode": os.environ.get("JUDGE_MODE", "rubric"),
        "rubric": RUBRIC,
        "max_requests": 50_000,
    },
}


@environment("explain")
class Explain(Environment):
    rewards = (JUDGE,)
    # Accuracy counts what got 8 of 10 points. Held-out words are answered four times: pairs need several answers.
    defaults: ClassVar = {"max_token_length": 128, "right": 0.8, "eval_samples": 4}

    def train_items(self) -> list[Item]:
        return [_ask(word) for word in TRAIN]

    def eval_items(self) -> list[Item]:
        return [_ask(word) for word in HELD_OUT]


def _ask(word: str) -> Item:
    return Item.ask(f"Explain the word '{word}' to a child of eight, in one or two sentences.", answer="")
