"""Incremental detokenization: deltas add up to the text, multi-token characters, stop strings; chat templates."""

from __future__ import annotations

import json
import threading
from functools import partial

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from tests.tiny_model import write_tiny_model
from treadle import tokenizer_file
from treadle.chat_template import compile_template
from treadle.engines.tokenizer import IncrementalDetokenizer, ModelTokenizer
from treadle.errors import ModelError, RequestError


@pytest.fixture(scope="module")
def byte_text(tmp_path_factory):
    """One token per byte, so that most characters are several tokens."""
    vocabulary = {character: i for i, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    return ModelTokenizer(tokenizer, tmp_path_factory.mktemp("none"))


@pytest.fixture(scope="module")
def spaced_text(tmp_path_factory):
    """Like Llama 2: a word includes the space before it, which the first word of a text omits."""
    vocabulary = {word: i for i, word in enumerate(["\u2581is", "\u2581Paris", "\u2581France", "?", "<turn>"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, "?"))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    tokenizer.add_special_tokens(["<turn>"])
    return ModelTokenizer(tokenizer, tmp_path_factory.mktemp("spaced"))


IS, PARIS, FRANCE, _, TURN = range(5)


@pytest.mark.parametrize(
    ("before", "expected"),
    [([FRANCE], " is Paris"), ([FRANCE, TURN], " is Paris"), ([TURN], "is Paris"), ([], "is Paris")],
)
def test_the_space_before_the_first_word_depends_on_the_prompt(spaced_text, before, expected):
    assert spaced_text.decode_after(before, [IS, PARIS]) == expected
    assert "".join(streamed_pieces(spaced_text, [IS, PARIS], before=before)[0]) == expected


def test_a_prompt_that_ends_inside_a_character_is_no_context(byte_text):
    smile = byte_text.encode("🙂")
    rest = byte_text.decode(smile[2:])
    assert byte_text.decode_after(smile[:2], smile[2:]) == rest
    assert "".join(streamed_pieces(byte_text, smile[2:], before=smile[:2])[0]) == rest


@pytest.fixture(scope="module")
def byte_fallback_text(tmp_path_factory):
    """Like Llama 2: a character without a token is encoded as bytes, and a broken one affects its neighbours."""
    words = ["\u2581Hi", "\u2581word", *(f"<0x{byte:02X}>" for byte in range(256)), "?"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, "?"))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return ModelTokenizer(tokenizer, tmp_path_factory.mktemp("fallback"))


@pytest.mark.parametrize(
    ("prompt", "completion", "expected"),
    [
        ("字", [1], " word"),
        ("汉字", [1], " word"),  # the last four tokens begin in the middle of a character
        ("字", [2 + 0xE6, 1], "\ufffd word"),
    ],
)
def test_bytes_of_a_prompt_are_not_repeated(byte_fallback_text, prompt, completion, expected):
    before = [0, *(2 + byte for byte in prompt.encode())]
    assert byte_fallback_text.decode_after(before, completion) == expected
    assert "".join(streamed_pieces(byte_fallback_text, completion, before=before)[0]) == expected


def streamed_pieces(text, token_ids, stop=(), before=()):
    """The streamed text, token by token, and whether a stop string was found."""
    written, pieces = IncrementalDetokenizer(text, stop, before), []
    for token in token_ids:
        if written.add(token):
            return [*pieces, written.take_new_text(is_finished=True)], True
        pieces.append(written.take_new_text(is_finished=False))
    written.finish()
    return [*pieces, written.take_new_text(is_finished=True)], False


@pytest.mark.parametrize("words", ["plain words", "Größe, 数学 and 🙂 too", "日本語"])
def test_pieces_add_up_to_the_whole_text_and_none_has_half_a_character(byte_text, words):
    pieces, _ = streamed_pieces(byte_text, byte_text.encode(words))
    assert "".join(pieces) == words
    assert not any("\ufffd" in piece for piece in pieces)


def test_special_tokens_do_not_appear_in_text(byte_text):
    end = byte_text.encode("<end>")
    pieces, _ = streamed_pieces(byte_text, [*byte_text.encode("ab"), *end, *end, *byte_text.encode("c d"), *end])
    assert "".join(pieces) == "abc d"


def test_an_incomplete_character_is_rendered_as_the_decoder_does(byte_text):
    ids = byte_text.encode("a🙂")[:-1]
    pieces, _ = streamed_pieces(byte_text, ids)
    assert "".join(pieces) == byte_text.decode(ids)


@pytest.mark.parametrize(
    ("stop", "expected"),
    [(["wor"], "hello "), (["ld", "o w"], "hell"), (["hello world"], ""), (["hellx"], "hello world")],
)
def test_no_part_of_a_stop_string_is_ever_sent(byte_text, stop, expected):
    pieces, is_stopped = streamed_pieces(byte_text, byte_text.encode("hello world"), stop)
    assert "".join(pieces) == expected
    assert is_stopped == (expected != "hello world")


def test_a_possible_stop_string_is_held_back_until_it_cannot_match(byte_text):
    pieces, _ = streamed_pieces(byte_text, byte_text.encode("a<b<c"), ["<c>"])
    assert pieces[1] == ""  # "<": who knows
    assert pieces[2] == "<b"
    assert "".join(pieces) == "a<b<c"


def test_a_chat_is_rendered_with_the_models_template(tmp_path):
    folder = write_tiny_model(tmp_path)
    text = ModelTokenizer.load(folder)
    ids = encode_chat(text, [{"role": "user", "content": "Hi"}])
    assert [text.token(i) for i in ids] == ["H", "i", "<turn>"]
    assert encode_chat(text, [{"role": "user", "content": "Hi"}], add_generation_prompt=False) == ids[:-1]
    with pytest.raises(RequestError, match="holds none"):
        encode_chat(text, [])


def encode_chat(text, messages, **more):
    source, values = text.chat_template(messages, **more)
    return text.encode(compile_template(source).render(values), add_special_tokens=False)


def test_tools_go_through_a_template_that_takes_them(tmp_path):
    folder = write_tiny_model(tmp_path)
    template = "{% for t in tools or [] %}{{ t['function']['name'] }}{% endfor %}{{ messages[0]['content'] }}"
    (folder / "chat_template.jinja").write_text(template)
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    text = ModelTokenizer.load(folder)
    assert [text.token(i) for i in encode_chat(text, [{"role": "user", "content": "x"}], tools=tools)] == [*"add", "x"]


def test_a_model_without_a_template_or_without_a_tokenizer(tmp_path):
    folder = write_tiny_model(tmp_path)
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(RequestError, match="no chat template") as error:
        ModelTokenizer.load(folder).chat_template([{"role": "user", "content": "Hi"}])
    assert "/v1/completions" in error.value.fix
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match=r"cannot load the tokenizer in .*tokenizer\.json"):
        ModelTokenizer.load(folder)


def test_an_invalid_tokenizer_gives_a_readable_error(tmp_path):
    folder = write_tiny_model(tmp_path)
    text = ModelTokenizer.load(folder)
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": 7}')
    with pytest.raises(ModelError, match="cannot load the tokenizer in"):
        text.load_chat()


def test_several_templates_are_chosen_by_the_tools(tmp_path):
    folder = write_tiny_model(tmp_path)
    (folder / "chat_template.jinja").unlink()
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "with tools"}]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    text, messages = ModelTokenizer.load(folder), [{"role": "user", "content": "Hi"}]
    assert text.chat_template(messages)[0] == "plain"
    assert text.chat_template(messages, tools=[{"type": "function"}])[0] == "with tools"


ENDLESS = Regex("(x+x+)+y")


def test_a_tokenizer_that_decodes_by_a_regular_expression_is_refused(tmp_path):
    tokenizer = Tokenizer(models.WordLevel({"x": 0}, "x"))
    tokenizer.decoder = decoders.Sequence([decoders.Replace(ENDLESS, ""), decoders.Fuse()])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ModelError, match=r"the decoder of the tokenizer in .* has a regular expression"):
        ModelTokenizer.load(tmp_path)


def test_a_tokenizer_that_panics_gives_a_readable_error(tmp_path, capfd):
    tokenizer = Tokenizer(models.WordLevel({"x": 0}, "x"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(ENDLESS, "isolated")
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    text = ModelTokenizer.load(tmp_path)
    assert text.encode("x") == [0]
    for encode in (text.encode, partial(text.encode, add_special_tokens=False)):
        with pytest.raises(ModelError, match=r"tokenizer fails on this text: .*retry-limit"):
            encode("x" * 40)


def test_a_tokenizer_that_is_too_slow_is_refused(tmp_path, monkeypatch):
    tokenizer = Tokenizer(models.WordLevel({"x": 0}, "x"))
    slow = Regex("(?=(?:x|x){18}y)x|x")  # 2^18 ways at each character: too few for the library to give it up
    tokenizer.pre_tokenizer = pre_tokenizers.Split(slow, "isolated")
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    text = ModelTokenizer.load(tmp_path)
    assert text.encode("x") == [0]
    monkeypatch.setattr(tokenizer_file, "MAX_S", 0.1)
    for encode in (text.encode, partial(text.encode, add_special_tokens=False)):  # the second is not begun
        with pytest.raises(ModelError, match="the model's tokenizer takes more than"):
            encode("x" * 200)
    assert [thread.name for thread in threading.enumerate()].count("tokenizer") == 1
    tokenizer_file._given_up[0].result(120)  # not before: nothing can end it
    monkeypatch.setattr(tokenizer_file, "MAX_S", 60.0)
    assert text.encode("x") == [0]
