"""The recipe guess-number: the game, its score, and the games that `treadle sft` learns from."""

from __future__ import annotations

import asyncio

import pytest

from tests.recipes import environment_of, rows_in, script, working_folder
from tests.unit.envs.env_doubles import save_tokenizer
from treadle.envs import Item
from treadle.envs.chat import Model, RolloutSampling
from treadle.envs.chat_format import ChatTokenizer
from treadle.envs.engine_client import Completion, EngineResult
from treadle.errors import ConfigError

GUESS = script("guess-number", "guess_number.py")


@pytest.fixture
def environment(tmp_path, monkeypatch):
    monkeypatch.chdir(working_folder(tmp_path))
    return environment_of("guess-number")


class Player:
    """Makes the given guesses, and halves where there are none left."""

    def __init__(self, guesses):
        self.guesses = list(guesses)

    async def generate(self, prompt_token_ids, *, n=1, max_tokens, temperature, seed=None, stop=(), conversation=""):
        text = self.guesses.pop(0)
        return EngineResult([Completion([1] * 2, [-0.5] * 2, text, "stop", policy_version=0)], seconds=0.1)


def play(environment, item: Item, guesses, folder):
    tokenizer = ChatTokenizer.load(save_tokenizer(folder / "tokenizer"))
    model = Model(Player(guesses), tokenizer, RolloutSampling(max_tokens=8, temperature=1.0))
    score = asyncio.run(environment.rollout(item, model))
    return score, [message["content"] for message in model.transcripts[0].messages[2::2]]


def item_of(environment, low: int, answer: int) -> Item:
    items = [*environment.train_items(), *environment.eval_items()]
    return next(item for item in items if item.metadata["low"] == low and item.answer == str(answer))


@pytest.mark.parametrize(
    ("guesses", "worth", "hints"),
    [
        (["7"], 1.0, []),
        (["5", "It is 7."], 0.9, ["higher"]),
        (["9", "5", "8", "6", "1", "7"], 0.5, ["lower", "higher", "lower", "higher", "higher"]),
        (["1", "2", "3", "4", "5", "6"], 0.2, ["higher"] * 6),
        (["6"] * 6, 0.2 / 6, ["higher"] * 6),
        (["99"] * 6, 0.0, ["lower"] * 6),
        (["what?", "1 or 2", "", "12345", "7"], 0.6, ["Answer with one number."] * 4),
        (["no"] * 6, 0.0, ["Answer with one number."] * 6),
    ],
)
def test_a_game_is_worth_more_the_earlier_it_is_won(environment, tmp_path, guesses, worth, hints):
    score, said = play(environment, item_of(environment, 1, 7), guesses, tmp_path)
    assert score.reward == pytest.approx(worth)
    assert score.is_right == (worth >= GUESS.LATEST)
    assert said == hints
    assert score.parts == {"turns": float(len(guesses))}


def test_ranges_of_held_out_numbers_are_not_trained_on(environment):
    train, held_out = environment.train_items(), environment.eval_items()
    assert not {item.metadata["low"] for item in train} & {item.metadata["low"] for item in held_out}
    assert {1, 2, 4, 5} <= {item.metadata["low"] for item in train}, "as README.md says of 3 to 14"
    assert 3 in {item.metadata["low"] for item in held_out}
    assert len(held_out) == environment.config.num_eval
    assert len({(item.metadata["low"], item.answer) for item in train}) == len(train)


def test_games_by_halving_are_won_within_four_turns(environment, tmp_path):
    GUESS.write_games(tmp_path / "games")
    for split, items in (("train", environment.train_items()), ("test", environment.eval_items())):
        rows = rows_in(tmp_path / "games" / f"{split}.jsonl")
        assert len(rows) == len(items)
        for row, item in zip(rows, items, strict=True):
            messages = row["messages"]
            assert messages[0] == item.messages[0]
            assert messages[-1] == {"role": "assistant", "content": item.answer}
            assert [message["role"] for message in messages] == ["user", "assistant"] * (len(messages) // 2)
            assert len(messages) <= 8
    rows = rows_in(tmp_path / "games" / "test.jsonl")
    row, item = rows[0], environment.eval_items()[0]
    guesses = [message["content"] for message in row["messages"][1::2]]
    score, hints = play(environment, item, guesses, tmp_path)
    assert score.is_right
    assert hints == [message["content"] for message in row["messages"][2::2]]


def test_a_game_without_a_choice_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(working_folder(tmp_path))
    with pytest.raises(ConfigError, match="at least 2"):
        environment_of("guess-number", env__args='{"num_values": 1}')
