"""A task of twenty lines: name the capital.

treadle env examples/capitals.py validate        is the task sound? needs no model
treadle run --env.name examples/capitals.py      train on it
"""

from treadle.envs import Environment, Item, environment
from treadle.envs.rewards import RewardInput, reward

CAPITALS = {"France": "Paris", "Peru": "Lima", "Kenya": "Nairobi", "Japan": "Tokyo", "Chile": "Santiago"}


@reward
def names_it(completion: RewardInput) -> float:
    return completion.text.strip(" .").lower() == completion.answer.lower()


@environment("capitals")
class Capitals(Environment):
    rewards = (names_it,)

    def train_items(self) -> list[Item]:
        return [Item.ask(f"What is the capital of {land}? One word.", answer=city) for land, city in CAPITALS.items()]

    def eval_items(self) -> list[Item]:
        return [Item.ask("What is the capital of Italy? One word.", answer="Rome")]
