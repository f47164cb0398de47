"""Guess a number: the environment answers every guess with "higher" or "lower". A game of several turns.

python recipes/guess-number/guess_number.py                write games played by halving, for `treadle sft`
treadle run --config recipes/guess-number/recipe.toml      train on games with the model
"""

import json
import re
from pathlib import Path
from typing import ClassVar

import msgspec

from treadle.config.env import EnvConfig
from treadle.envs import Environment, Item, Model, Score, environment
from treadle.envs.base import Message, parse_args, stable_shuffle
from treadle.errors import ConfigError

FOLDER = Path("data/guess-number")
HIGHEST_START = 80  # of the range that the number is in
HELD_OUT_EVERY = 8  # one of eight ranges is never trained on
LATEST = 0.5  # worth of a number that is found in the last turn
CONSISTENT = 0.2  # worth of a lost game in which every guess was possible
NO_NUMBER = "Answer with one number."


class GuessArgs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings in `--env.args`."""

    num_values: int = 12  # numbers in a range; halving needs at most 4 guesses
    max_turns: int = 6


@environment("guess-number")
class GuessNumber(Environment):
    """1 for the first guess down to LATEST for the last one; a lost game: up to CONSISTENT, by its possible guesses."""

    defaults: ClassVar = {"task": "", "max_token_length": 8}

    def __init__(self, config: EnvConfig) -> None:
        super().__init__(config)
        self._args = parse_args(config, GuessArgs)
        if self._args.num_values < 2 or self._args.max_turns < 2:
            raise ConfigError("num_values and max_turns are at least 2", fix="change --env.args")

    def train_items(self) -> list[Item]:
        return [item for low in range(1, HIGHEST_START + 1) if not _is_held_out(low) for item in self._items(low)]

    def eval_items(self) -> list[Item]:
        items = [item for low in range(1, HIGHEST_START + 1) if _is_held_out(low) for item in self._items(low)]
        return stable_shuffle(items, "guess-number", "held-out order")

    async def rollout(self, item: Item, model: Model) -> Score:
        chat = model.chat(item.messages)
        low, high = item.metadata["low"], item.metadata["high"]
        answer, num_possible = int(item.answer), 0
        for turn in range(self._args.max_turns):
            guess = read_guess((await chat.ask()).text)
            if guess == answer:
                share_left = 1 - turn / (self._args.max_turns - 1)
                return Score(reward=LATEST + (1 - LATEST) * share_left, is_right=True, parts={"turns": turn + 1.0})
            if guess is None:
                chat.add({"role": "user", "content": NO_NUMBER})
                continue
            num_possible += low <= guess <= high
            low, high = (max(low, guess + 1), high) if guess < answer else (low, min(high, guess - 1))
            chat.add({"role": "user", "content": hint(guess, answer)})
        lost = CONSISTENT * num_possible / self._args.max_turns
        return Score(reward=lost, is_right=False, parts={"turns": float(self._args.max_turns)})

    def _items(self, low: int) -> list[Item]:
        high = low + self._args.num_values - 1
        rules = f"I think of a number from {low} to {high}. Guess it: answer with one number. I say higher or lower."
        return [Item.ask(rules, answer=number, low=low, high=high) for number in range(low, high + 1)]


def read_guess(text: str) -> int | None:
    """The only number in a reply; None if it has none or several."""
    numbers = re.findall(r"\d+", text)
    return int(numbers[0]) if len(numbers) == 1 and len(numbers[0]) <= 4 else None


def hint(guess: int, answer: int) -> str:
    return "higher" if guess < answer else "lower"


def _is_held_out(low: int) -> bool:
    return low % HELD_OUT_EVERY == 3


def game_by_halving(item: Item) -> list[Message]:
    """The conversation in which every guess is the middle of the numbers that are left."""
    messages = list(item.messages)
    low, high, answer = item.metadata["low"], item.metadata["high"], int(item.answer)
    while True:
        guess = (low + high) // 2
        messages.append({"role": "assistant", "content": str(guess)})
        if guess == answer:
            return messages
        low, high = (guess + 1, high) if guess < answer else (low, guess - 1)
        messages.append({"role": "user", "content": hint(guess, answer)})


def write_games(folder: Path = FOLDER) -> None:
    """Games with every number of the ranges of training, and those of the held-out ones as test.jsonl."""
    folder.mkdir(parents=True, exist_ok=True)
    task = GuessNumber(EnvConfig(name="guess-number"))
    for split, items in (("train", task.train_items()), ("test", task.eval_items())):
        rows = [{"messages": game_by_halving(item)} for item in items]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    write_games()
    print(f"wrote {FOLDER}")
