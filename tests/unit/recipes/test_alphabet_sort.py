"""The recipe alphabet-sort: its rows and its reward."""

from __future__ import annotations

import pytest

from tests.recipes import script
from treadle.envs.rewards import RewardInput, registry

ROWS = script("alphabet-sort", "rows.py")
sorted_pairs = script("alphabet-sort", "reward.py").sorted_pairs


def names_in(row: dict[str, str]) -> list[str]:
    return row["prompt"].partition(": ")[2].split(", ")


def test_rows_are_always_the_same_and_no_list_is_in_both_splits():
    rows = ROWS.make_rows()
    assert rows == ROWS.make_rows()
    assert {split: len(of_split) for split, of_split in rows.items()} == ROWS.NUM_ROWS
    lists = [frozenset(names_in(row)) for of_split in rows.values() for row in of_split]
    assert len(set(lists)) == len(lists)


def test_the_answer_is_the_sorted_list_and_no_list_is_sorted_already():
    for row in ROWS.make_rows()["test"]:
        names = names_in(row)
        assert row["answer"] == ", ".join(sorted(names))
        assert names != sorted(names)
        assert ROWS.MIN_NAMES <= len(names) <= ROWS.MAX_NAMES


@pytest.mark.parametrize(
    ("text", "worth", "is_right"),
    [
        ("Ada, Carl, Nina", 1.0, True),
        (" Ada,Carl, Nina\n", 1.0, True),
        ("Carl, Ada, Nina", 2 / 3, False),
        ("Nina, Carl, Ada", 0.0, False),
        ("Ada, Carl", 0.0, False),
        ("Ada, Carl, Nina, Otto", 0.0, False),
        ("Ada, Ada, Carl, Nina", 0.0, False),
        ("", 0.0, False),
    ],
)
def test_the_reward_is_the_share_of_pairs_in_order(text, worth, is_right):
    judged = registry.create(sorted_pairs).score(RewardInput(text, answer="Ada, Carl, Nina"))
    assert (float(judged), judged.correct) == (pytest.approx(worth), is_right)
