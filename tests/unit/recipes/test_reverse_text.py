"""The recipe reverse-text: its rows and its reward."""

from __future__ import annotations

import pytest

from tests.recipes import environment_of, rows_in, script, working_folder
from treadle.envs.rewards import RewardInput, registry

ROWS = script("reverse-text", "rows.py")
similarity = script("reverse-text", "reward.py").similarity


def score(text: str, answer: str = "cisum regit") -> tuple[float, bool]:
    judged = registry.create(similarity).score(RewardInput(text, answer=answer))
    return float(judged), judged.correct


def test_rows_are_always_the_same_and_held_out_texts_are_not_trained_on():
    rows = ROWS.make_rows()
    assert rows == ROWS.make_rows()
    assert {split: len(of_split) for split, of_split in rows.items()} == ROWS.NUM_ROWS
    prompts = [row["prompt"] for of_split in rows.values() for row in of_split]
    assert len(set(prompts)) == len(prompts)


def test_the_answer_is_the_text_with_its_letters_reversed():
    for row in ROWS.make_rows()["test"]:
        _, _, text = row["prompt"].partition(": ")
        assert row["answer"] == text[::-1]
        assert ROWS.MIN_WORDS <= len(text.split()) <= ROWS.MAX_WORDS


@pytest.mark.parametrize(
    ("text", "worth", "is_right"),
    [
        ("cisum regit", 1.0, True),
        (" cisum regit\n", 1.0, True),
        ("", 0.0, False),
        ("1234567890!", 0.0, False),
        ("cisum", 10 / 16, False),
        ("Cisum regit", 20 / 22, False),
    ],
)
def test_the_reward_is_the_share_of_matching_letters(text, worth, is_right):
    assert score(text) == (pytest.approx(worth), is_right)


def test_the_run_reads_the_rows_that_the_script_writes(tmp_path, monkeypatch):
    monkeypatch.chdir(working_folder(tmp_path))
    ROWS.write_rows(ROWS.FOLDER)
    environment = environment_of("reverse-text")
    assert len(environment.train_items()) == len(rows_in(ROWS.FOLDER / "train.jsonl")) == ROWS.NUM_ROWS["train"]
    assert len(environment.eval_items()) == environment.config.num_eval == ROWS.NUM_ROWS["test"]
