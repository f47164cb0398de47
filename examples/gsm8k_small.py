"""GSM8K for a small model: the last number that it writes counts as its answer.

treadle run --env.name examples/gsm8k_small.py --env.data FOLDER      train.jsonl and test.jsonl of GSM8K

With a model of 135 million parameters nearly all groups have only wrong answers, and no learning signal. So there is
also a small reward for an answer that ends in time with a number in its last line; accuracy counts only right numbers.
"""

import re
from typing import ClassVar

from treadle.envs import environment
from treadle.envs.rewards import RewardInput, reward
from treadle.envs.rewards.parsing import read_number
from treadle.envs.tasks.datasets import Gsm8k

NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


@reward
def last_number(completion: RewardInput) -> float:
    said = NUMBER.findall(completion.text)
    found, gold = read_number(said[-1]) if said else None, read_number(completion.answer)
    return found is not None and gold is not None and found.value == gold.value


@reward(weight=0.2)
def comes_to_an_end(completion: RewardInput) -> float:
    return completion.finish_reason == "stop" and bool(NUMBER.search(completion.text.rstrip().rpartition("\n")[2]))


@environment("gsm8k_small")
class Gsm8kSmall(Gsm8k):
    rewards = (last_number, comes_to_an_end)
    defaults: ClassVar = {**Gsm8k.defaults, "group_size": 16, "max_token_length": 256, "length_penalty": False}

    def own_system_prompt(self) -> str:
        return "Solve the problem in a few short steps. End with the answer as a number."
