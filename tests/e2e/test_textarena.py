"""An unmodified third-party environment: verifiers' TextArena taskset, playing Hangman.

Its tasks, its game, its harness (`null`: a program of verifiers in a process of its own) and its rewards are theirs.
Ours are the adapter, the recorder, the engine and the hub; and the word, because the list of words is a download.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from tests.e2e.foreign.chain_model import write_chain_model
from tests.e2e.foreign.parts import check_exact, check_turns, engine, next_batch, serving_verifiers
from tests.hub_process import HubProcess

# Rare: every turn is a process that imports for a second. test_foreign_envs.py has a simpler environment of verifiers.
pytestmark = [pytest.mark.slow, pytest.mark.full]
WORD = "at"
# Moves are [AT], [A], [T] and [S], the likeliest first.
NEXT = {"<turn>": "[", "[": "ATS", "A": "T]", "T": "]", "S": "]", "]": ["<end>"]}
NUM_GROUPS, GROUP_SIZE, MAX_TURNS = 2, 2, 3
TRAINER = {
    "wandb_group": "", "wandb_project": "", "batch_size": NUM_GROUPS * GROUP_SIZE, "max_token_len": 2000,
    "checkpoint_dir": "", "save_checkpoint_interval": 1, "starting_step": 0, "num_steps": 1,
}  # fmt: skip
ARGS = {"taskset": {"game": "Hangman-v0"}, "player": {"harness": {"id": "null"}, "max_turns": MAX_TURNS}}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_chain_model(tmp_path_factory.mktemp("textarena") / "model", NEXT, step=0.4)


@pytest.fixture(scope="module")
def engine_url(model):
    with engine(model, model.parent / "engine.log") as url:
        yield url


@pytest.fixture(scope="module")
def words(model):
    """Where nltk finds its lists of words. Not writable, because the game has nltk fetch them: others, over these."""
    folder = model.parent / "nltk"
    lists = folder / "corpora" / "words"
    lists.mkdir(parents=True)
    for name in ("en", "en-basic"):
        (lists / name).write_text(f"{WORD}\n")
    folder.chmod(0o555)
    return folder


@dataclass(frozen=True)
class Run:
    groups: list[dict[str, Any]]  # of one batch, as the hub gave them out
    evaluation: dict[str, Any]  # before the first step


@pytest.fixture(scope="module")
def run(words, engine_url, model):
    folder = model.parent
    asked = {
        "openai.base-url": f"{engine_url}/v1", "openai.model": str(model), "env.args": json.dumps(ARGS),
        "env.max-token-length": "12", "env.group-size": str(GROUP_SIZE), "env.max-age": "0", "env.num-eval": "1",
        "env.seed": "1", "env.state-dir": str(folder / "state"), "env.data-dir-to-save-evals": str(folder / "evals"),
    }  # fmt: skip
    flags = [word for name, value in asked.items() for word in (f"--{name}", value)]
    log = folder / "env.log"
    with HubProcess(folder) as hub:
        httpx.post(f"{hub.url}/register", json=TRAINER).raise_for_status()
        with serving_verifiers("textarena", hub.url, *flags, log=log, NLTK_DATA=str(words)) as process:
            groups = next_batch(hub.url, process, log, timeout_s=180)
    return Run(groups, json.loads((folder / "evals" / "eval_step_000000.json").read_text()))


def test_games_are_scored_by_the_game_and_delivered_exactly(run, engine_url):
    assert [len(group["tokens"]) for group in run.groups] == [GROUP_SIZE] * NUM_GROUPS
    games = []
    for group in run.groups:
        for place, (messages, score) in enumerate(zip(group["messages"], group["scores"], strict=True)):
            moves = [message["content"] for message in messages if message["role"] == "assistant"]
            assert [message["role"] for message in messages[:2]] == ["system", "user"]
            assert "You are playing Hangman" in messages[1]["content"]
            tokens, masks, logprobs = (group[key][place] for key in ("tokens", "masks", "inference_logprobs"))
            check_turns(tokens, masks, num_turns=len(moves))
            assert check_exact(engine_url, tokens, masks, logprobs) == sum(len(move) + 1 for move in moves)
            assert score == pytest.approx(worth_of(moves)), moves
            games.append((score, moves))
    print("\n".join(f"{score:.2f} {' '.join(moves)}" for score, moves in games))
    assert len({score for score, _ in games}) > 1  # the seed is one by which games are both won and lost
    assert len({len(moves) for _, moves in games}) > 1


def test_greedy_play_names_the_word_and_the_whole_reward_arrives(run):
    """Evaluations draw nothing at random: the likeliest move wins the game, and the game pays 1 for that."""
    assert (run.evaluation["num_answers"], run.evaluation["accuracy"]) == (1, 1.0)
    assert [(one["completion"], one["reward"]) for one in run.evaluation["samples"]] == [("[AT]", 1.0)]


def worth_of(moves: list[str]) -> float:
    """Hangman's rules, for a game of at most MAX_TURNS moves; one that is broken off is worth nothing."""
    guessed: set[str] = set()
    may_err = True
    for move in moves:
        found = re.search(r"\[([a-zA-Z]+)\]", move)
        guess = found[1].lower() if found else ""
        if guess == WORD:
            return 1.0
        if not guess or (len(guess) == 1 and guess in guessed):
            if not may_err:
                return len(guessed & set(WORD)) / len(WORD)
            may_err = False
        elif len(guess) == 1:
            guessed.add(guess)
        if guessed >= set(WORD):
            return 1.0
    return 0.0
