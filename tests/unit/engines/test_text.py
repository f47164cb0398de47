"""Text while it grows: what is told adds up, characters of several tokens, and stop strings that never show."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.tiny_model import write_tiny_model
from treadle.engines.text import Text, Written
from treadle.errors import ModelError, RequestError


@pytest.fixture(scope="module")
def byte_text(tmp_path_factory):
    """One token a byte, so that most characters are several tokens."""
    vocabulary = {character: i for i, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    return Text(tokenizer, tmp_path_factory.mktemp("none"))


def told_pieces(text, token_ids, stop=()):
    """What a reader gets, token by token, and whether it was stopped."""
    written, pieces = Written(text, stop), []
    for token in token_ids:
        if written.add(token):
            return [*pieces, written.news(is_finished=True)], True
        pieces.append(written.news(is_finished=False))
    written.finish()
    return [*pieces, written.news(is_finished=True)], False


@pytest.mark.parametrize("words", ["plain words", "Größe, 数学 and 🙂 too", "日本語"])
def test_pieces_add_up_to_the_whole_text_and_none_has_half_a_character(byte_text, words):
    pieces, _ = told_pieces(byte_text, byte_text.encode(words))
    assert "".join(pieces) == words
    assert not any("\ufffd" in piece for piece in pieces)


def test_special_tokens_between_others_leave_no_trace(byte_text):
    end = byte_text.encode("<end>")
    pieces, _ = told_pieces(byte_text, [*byte_text.encode("ab"), *end, *end, *byte_text.encode("c d"), *end])
    assert "".join(pieces) == "abc d"


def test_an_unfinished_character_shows_as_the_decoder_shows_it(byte_text):
    ids = byte_text.encode("a🙂")[:-1]
    pieces, _ = told_pieces(byte_text, ids)
    assert "".join(pieces) == byte_text.decode(ids)


@pytest.mark.parametrize(
    ("stop", "expected"),
    [(["wor"], "hello "), (["ld", "o w"], "hell"), (["hello world"], ""), (["hellx"], "hello world")],
)
def test_no_part_of_a_stop_string_is_ever_told(byte_text, stop, expected):
    pieces, is_stopped = told_pieces(byte_text, byte_text.encode("hello world"), stop)
    assert "".join(pieces) == expected
    assert is_stopped == (expected != "hello world")


def test_what_may_become_a_stop_string_is_kept_back_until_it_cannot(byte_text):
    pieces, _ = told_pieces(byte_text, byte_text.encode("a<b<c"), ["<c>"])
    assert pieces[1] == ""  # "<": who knows
    assert pieces[2] == "<b"
    assert "".join(pieces) == "a<b<c"


def test_a_chat_is_written_by_the_models_template(tmp_path):
    folder = write_tiny_model(tmp_path)
    text = Text.load(folder)
    ids = text.encode_chat([{"role": "user", "content": "Hi"}])
    assert [text.token(i) for i in ids] == ["H", "i", "<turn>"]
    assert text.encode_chat([{"role": "user", "content": "Hi"}], add_generation_prompt=False) == ids[:-1]
    (folder / "chat_template.jinja").write_text("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(RequestError, match="roles must alternate"):
        Text.load(folder).encode_chat([{"role": "user", "content": "Hi"}])


def test_tools_go_through_a_template_that_takes_them(tmp_path):
    folder = write_tiny_model(tmp_path)
    template = "{% for t in tools or [] %}{{ t['function']['name'] }}{% endfor %}{{ messages[0]['content'] }}"
    (folder / "chat_template.jinja").write_text(template)
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    text = Text.load(folder)
    assert [text.token(i) for i in text.encode_chat([{"role": "user", "content": "x"}], tools=tools)] == [*"add", "x"]


def test_a_model_without_a_template_or_without_a_tokenizer(tmp_path):
    folder = write_tiny_model(tmp_path)
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(RequestError, match="no chat template") as error:
        Text.load(folder).encode_chat([{"role": "user", "content": "Hi"}])
    assert "/v1/completions" in error.value.fix
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match="cannot load the tokenizer"):
        Text.load(folder)
