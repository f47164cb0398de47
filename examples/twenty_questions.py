"""A task with several turns: find a number between 1 and 100 by asking whether it is larger.

    treadle run --env.name examples/twenty_questions.py --env.max-token-length 16

Every reply is trained on, with exactly the sampled tokens; the answers of the game are not.
"""

import re

from treadle.envs import Environment, Item, Model, environment

MAX_TURNS = 8
RULES = "I think of a number between 1 and 100. Guess it: answer with only a number. I say 'larger' or 'smaller'."


@environment("twenty-questions")
class TwentyQuestions(Environment):
    def train_items(self) -> list[Item]:
        return [Item.ask(RULES, answer=str(number)) for number in range(1, 101) if number % 12 != 3]

    def eval_items(self) -> list[Item]:
        return [Item.ask(RULES, answer=str(number)) for number in range(3, 100, 12)]

    async def rollout(self, item: Item, model: Model) -> float:
        chat = model.chat(item.messages)
        nearest = 100
        for turn in range(MAX_TURNS):
            guess = re.search(r"\d+", (await chat.ask()).text)
            if guess is None:
                return -1.0
            distance = abs(int(guess.group()) - int(item.answer))
            if distance == 0:
                return 1.0 - turn / MAX_TURNS / 2
            nearest = min(nearest, distance)
            chat.add({"role": "user", "content": "larger" if int(guess.group()) < int(item.answer) else "smaller"})
        return -nearest / 100
