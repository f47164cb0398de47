"""GSM8K for a model too small to keep to a form: the last number that it writes counts as its answer.

treadle run --env.name examples/gsm8k_small.py --env.data FOLDER      train.jsonl and test.jsonl of GSM8K
"""

import re
from typing import ClassVar

from treadle.envs import environment
from treadle.envs.rewards import RewardInput, reward
from treadle.envs.rewards.plain_numbers import read_number
from treadle.envs.tasks.gsm8k import Gsm8k

NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


@reward
def last_number(completion: RewardInput) -> float:
    said = NUMBER.findall(completion.text)
    found, gold = read_number(said[-1]) if said else None, read_number(completion.answer)
    return found is not None and gold is not None and found.value == gold.value


@environment("gsm8k_small")
class Gsm8kSmall(Gsm8k):
    rewards = (last_number,)
    defaults: ClassVar = {**Gsm8k.defaults, "group_size": 16, "max_token_length": 256, "length_penalty": False}

    def own_system_prompt(self) -> str:
        return "Solve the problem in a few short steps. End with the answer as a number."
