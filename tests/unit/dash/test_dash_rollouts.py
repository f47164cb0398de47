"""A group for the eyes: odd ones too, huge ones in part, and characters that are spread over several tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models

from treadle.dash.rollouts import MAX_GROUP_TOKENS_SHOWN, MAX_ROLLOUTS_SHOWN, TokenDecoder, view_rollouts
from treadle.wire.groups import ScoredGroup

BYTES = {"Ã": 0, "¤": 1, "a": 2, "Ġ": 3}  # 0 and 1 are the two bytes of one letter, in a byte-level vocabulary


@pytest.fixture
def decoder(tmp_path: Path) -> TokenDecoder:
    tokenizer = Tokenizer(models.WordLevel(BYTES, "a"))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return TokenDecoder(tmp_path)


def group(tokens: list[list[int]], **more) -> ScoredGroup:
    return ScoredGroup(tokens=tokens, masks=tokens, scores=[0.0] * len(tokens), **more)


def test_a_character_spread_over_tokens_is_shown_at_the_first(decoder: TokenDecoder):
    assert decoder.pieces([2, 0, 1, 3, 2]) == ["a", "ä", "", " ", "a"]


def test_a_part_of_a_character_that_never_becomes_whole_stays_what_it_is(decoder: TokenDecoder):
    assert decoder.pieces([0, 2, 0]) == ["\ufffd", "a", "\ufffd"]


def test_a_huge_group_is_shown_in_part(decoder: TokenDecoder):
    shown = view_rollouts(group([[2] * 3000] * 300), decoder)
    assert len(shown) == MAX_ROLLOUTS_SHOWN
    assert sum(len(one.ids) for one in shown) <= MAX_GROUP_TOKENS_SHOWN
    assert shown[0].num_tokens == 3000


def test_fewer_messages_or_advantages_than_rollouts_are_taken_as_they_are():
    odd = group([[1, 2], [1, 3]], messages=[[{"role": "user", "content": "?"}]], advantages=[[0.5, 0.5]])
    first, second = view_rollouts(odd, TokenDecoder(None))
    assert (first.messages, first.advantages) == ([{"role": "user", "content": "?"}], [0.5, 0.5])
    assert (second.messages, second.advantages) == (None, None)


def test_messages_are_sent_only_where_tokens_cannot_be_read(decoder: TokenDecoder):
    messages_of_all = [[{"role": "user", "content": "?"}]]
    assert view_rollouts(group([[2, 2]], messages=messages_of_all), decoder)[0].messages is None
    assert (
        view_rollouts(group([[2, 2]], messages=messages_of_all), TokenDecoder(None))[0].messages == messages_of_all[0]
    )
