"""Rows become tokens with a mask: the loss is on exactly what the model writes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.tiny_model import TEMPLATE, write_tiny_model
from treadle.config.flag_spelling import respell_flags
from treadle.config.sft import SftConfig
from treadle.envs.chat_format import ChatTokenizer
from treadle.envs.rows import Row, RowError
from treadle.errors import ConfigError
from treadle.sft.data import (
    Example,
    ExampleFile,
    encode_row,
    load_examples,
    num_steps,
    rows_of_step,
    save_examples,
    split_off,
)
from treadle.wire.groups import IGNORED

# A header for each turn, a special token at its end, and a line break behind it, as ChatML has them.
CHATML = (
    "{% for m in messages %}<turn>{{ m['role'] }}\n{{ m['content'] }}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<turn>assistant\n{% endif %}"
)
# Drops the thinking of all turns but the last.
FORGETS = (
    "{% for m in messages %}<turn>{{ m['role'] }}\n"
    "{{ m['content'] if loop.last else m['content'].split('|')[-1] }}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<turn>assistant\n{% endif %}"
)
TWO_TURNS = [
    {"role": "system", "content": "Add."},
    {"role": "user", "content": "2+3?"},
    {"role": "assistant", "content": "so|5"},
    {"role": "user", "content": "and 1?"},
    {"role": "assistant", "content": "6"},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), hidden_size=32, num_layers=1)


def tokenizer_with(folder: Path, template: str | None) -> ChatTokenizer:
    file = folder / "chat_template.jinja"
    file.unlink(missing_ok=True)
    if template is not None:
        file.write_text(template)
    return ChatTokenizer.load(folder)


def encode(tokenizer: ChatTokenizer, fields: dict, **options) -> list[Example]:
    return encode_row(Row(fields, "rows.jsonl:1"), tokenizer=tokenizer, **{"seq_len": 200} | options)


def marked(tokenizer: ChatTokenizer, example: Example) -> str:
    """The text, with what carries loss in brackets."""
    text, was_trained = "", False
    for token, is_trained in zip(example.tokens.tolist(), [*example.is_trained], strict=True):
        text += ("[" if is_trained else "]") if is_trained != was_trained else ""
        text += "".join(tokenizer.decode([token], skip_special_tokens=False))
        was_trained = is_trained
    return text + ("]" if was_trained else "")


def test_loss_is_on_each_turn_of_the_assistant_and_the_token_that_ends_it(folder):
    tokenizer = tokenizer_with(folder, CHATML)
    [example] = encode(tokenizer, {"messages": TWO_TURNS})
    assert marked(tokenizer, example) == (
        "<turn>system\nAdd.<end>\n<turn>user\n2+3?<end>\n<turn>assistant\n[so|5<end>]\n"
        "<turn>user\nand 1?<end>\n<turn>assistant\n[6<end>]"
    )
    whole = tokenizer.encode_chat(TWO_TURNS, add_generation_prompt=False)
    assert example.tokens.tolist() == whole[:-1]  # without the line break behind the last turn


def test_prompt_tokens_are_those_that_an_environment_samples_from(folder):
    tokenizer = tokenizer_with(folder, FORGETS)
    [example] = encode(tokenizer, {"messages": TWO_TURNS})
    first = tokenizer.encode_chat(TWO_TURNS[:2])
    reply = tokenizer.encode_turn(TWO_TURNS[:3])
    between = tokenizer.encode_next_turn(TWO_TURNS[3:4], after=reply[-1])
    assert example.tokens.tolist() == [*first, *reply, *between, *tokenizer.encode_turn(TWO_TURNS)]
    assert "[so|5<end>]" in marked(tokenizer, example)  # what a later turn's template would drop


def test_templates_without_a_header_or_an_end_take_the_text_and_eos(folder):
    tokenizer = tokenizer_with(folder, TEMPLATE)
    [example] = encode(tokenizer, {"prompt": "2+3?", "completion": "5"})
    assert marked(tokenizer, example) == "2+3?<turn>[5<end>]"
    tokenizer = tokenizer_with(folder, None)
    [example] = encode(tokenizer, {"question": "2+3?", "answer": "5"})
    assert marked(tokenizer, example) == "2+3?[5<end>]"


def test_a_prompt_gets_the_system_message_of_its_row_or_of_the_settings(folder):
    tokenizer = tokenizer_with(folder, CHATML)
    [example] = encode(tokenizer, {"prompt": "a", "completion": 7}, system_prompt="b")
    assert marked(tokenizer, example) == "<turn>system\nb<end>\n<turn>user\na<end>\n<turn>assistant\n[7<end>]"
    [example] = encode(tokenizer, {"prompt": "a", "completion": "c", "system": "d"}, system_prompt="b")
    assert marked(tokenizer, example).startswith("<turn>system\nd<end>\n")


def test_turns_of_a_conversational_prompt_carry_no_loss(folder):
    tokenizer = tokenizer_with(folder, CHATML)
    [example] = encode(tokenizer, {"prompt": TWO_TURNS[:4], "completion": TWO_TURNS[4:]})
    assert marked(tokenizer, example).count("[") == 1
    assert marked(tokenizer, example).endswith("assistant\n[6<end>]")


def test_a_plain_text_is_trained_on_whole_and_cut_into_pieces(folder):
    tokenizer = tokenizer_with(folder, CHATML)
    examples = encode(tokenizer, {"text": "abcdefg"}, seq_len=4)
    assert [marked(tokenizer, example) for example in examples] == ["a[bcd]", "e[fg<end>]"]


def test_a_long_chat_loses_its_end_and_a_long_prompt_is_refused(folder):
    tokenizer = tokenizer_with(folder, TEMPLATE)
    [example] = encode(tokenizer, {"prompt": "ab", "completion": "cdef"}, seq_len=5)
    assert example.is_cut_off
    assert marked(tokenizer, example) == "ab<turn>[cd]"
    with pytest.raises(RowError, match="its prompt fills the 3 tokens") as refused:
        encode(tokenizer, {"prompt": "ab", "completion": "cdef"}, seq_len=3)
    assert refused.value.fix == "--train.seq-len 6"


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"rows": 1}, "has none of the fields 'messages', 'prompt', 'text'"),
        ({"prompt": "a"}, "has none of the fields 'completion', 'answer', 'response'"),
        ({"messages": "hello"}, "and no list of messages"),
        ({"messages": [{"role": "robot", "content": "a"}]}, "message 1 of 'messages' has the role 'robot'"),
        ({"messages": [{"role": "user", "content": "a"}]}, "has no turn of the assistant"),
        (
            {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [{"name": "add"}]}]},
            "cannot write this assistant's turn",
        ),
    ],
)
def test_rows_that_cannot_be_trained_on_say_why(folder, fields, problem):
    with pytest.raises(RowError, match=problem) as refused:
        encode(tokenizer_with(folder, TEMPLATE), fields)
    assert refused.value.fix


def write_rows(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_held_out_prompts_are_never_trained_on(folder, tmp_path):
    tokenizer = tokenizer_with(folder, TEMPLATE)
    rows = [{"prompt": f"{n}+1=", "completion": f"{n + 1}{'.' * often}"} for n in range(40) for often in (0, 1)]
    data = write_rows(tmp_path / "rows.jsonl", [*rows, {"prompt": ""}])
    examples = load_examples(SftConfig(data=data, held_out=0.1), tokenizer, 64)
    assert (len(examples.train), len(examples.held_out), len(examples.broken)) == (72, 8, 1)
    prompts = {example.prompt for example in examples.held_out}
    assert not prompts & {example.prompt for example in examples.train}
    shuffled = split_off([*reversed(examples.train), *examples.held_out], 0.1)
    assert {example.prompt for example in shuffled.held_out} == prompts
    everything = load_examples(SftConfig(data=data, held_out=0.0), tokenizer, 64)
    assert (len(everything.train), everything.held_out) == (80, [])


def test_pieces_of_one_text_are_on_one_side(folder, tmp_path):
    tokenizer = tokenizer_with(folder, CHATML)
    texts = [f"{n}" * 11 for n in range(10)]  # three pieces each
    data = write_rows(tmp_path / "rows.jsonl", [{"text": text} for text in texts])
    examples = load_examples(SftConfig(data=data, held_out=0.2), tokenizer, 4)

    def digits(some):
        return {marked(tokenizer, one)[0] for one in some}

    assert (len(examples.train), len(examples.held_out)) == (24, 6)
    assert not digits(examples.train) & digits(examples.held_out)
    given = write_rows(tmp_path / "given.jsonl", [{"text": texts[3]}])
    kept = load_examples(SftConfig(data=data, eval_data=given), tokenizer, 4)
    assert "3" not in digits(kept.train)
    alone = write_rows(tmp_path / "alone.jsonl", [{"text": texts[3]}])
    assert load_examples(SftConfig(data=alone), tokenizer, 4).held_out == []


def test_errors_of_rows_name_the_flags_of_this_command(folder, tmp_path):
    tokenizer = tokenizer_with(folder, TEMPLATE)
    data = write_rows(tmp_path / "rows.jsonl", [{"q": "1+1"}])
    wrong = [
        SftConfig(data=data),
        SftConfig(data=data, data_columns="prompt=question"),
        SftConfig(data=data, data_split="train"),
        SftConfig(data=str(tmp_path / "none.jsonl")),
    ]
    for config, flag in zip(wrong, ("--data-columns", "--data-columns", "--data-split", "--data"), strict=True):
        with pytest.raises(ConfigError) as refused:
            load_examples(config, tokenizer, 64)
        shown = respell_flags("sft", refused.value.fix)
        assert flag in shown
        assert "--env" not in shown


def test_a_line_about_long_tokenizing_is_said(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("treadle.sft.data.SAY_EVERY_S", 0.0)
    data = write_rows(tmp_path / "rows.jsonl", [{"prompt": f"{n}", "completion": "1"} for n in range(3)])
    said = []
    load_examples(SftConfig(data=data), tokenizer_with(folder, TEMPLATE), 64, said.append)
    assert said[-1] == "tokenizing: 3 rows so far"


def test_rows_of_another_file_are_held_out(folder, tmp_path):
    tokenizer = tokenizer_with(folder, TEMPLATE)
    train = write_rows(tmp_path / "a.jsonl", [{"q": "1+1", "completion": "2"}, {"q": "1+2", "completion": "3"}])
    held_out = write_rows(tmp_path / "b.jsonl", [{"q": "1+2", "completion": "3"}])
    config = SftConfig(data=train, eval_data=held_out, data_columns="prompt=q")
    examples = load_examples(config, tokenizer, 64)
    assert [marked(tokenizer, one) for one in examples.train] == ["1+1<turn>[2<end>]"]
    assert [marked(tokenizer, one) for one in examples.held_out] == ["1+2<turn>[3<end>]"]
    with pytest.raises(ConfigError, match="all its prompts are held out"):
        load_examples(config.model_copy(update={"eval_data": train}), tokenizer, 64)


def test_examples_read_from_files_are_groups_with_the_same_masks(tmp_path):
    examples = [
        Example(np.array([5, 6, 7], np.int32), np.array([False, True, True])),
        Example(np.array([5, 9], np.int32), np.array([False, True])),
    ]
    save_examples(examples, tmp_path / "rows")
    saved = ExampleFile.open(tmp_path / "rows")
    assert len(saved) == 2
    assert saved.group(0).tokens == [[5, 6, 7]]
    assert saved.group(0).masks == [[IGNORED, 6, 7]]
    assert saved.group(1).masks == [[IGNORED, 9]]
    save_examples([], tmp_path / "none")
    assert len(ExampleFile.open(tmp_path / "none")) == 0
    with pytest.raises(ConfigError, match="cannot be read"):
        ExampleFile.open(tmp_path / "nowhere")


def test_each_epoch_has_every_row_once_in_another_order():
    steps = range(1, num_steps(10, 4, epochs=3) + 1)
    batches = [rows_of_step(step, 10, 4, end=30, seed=3) for step in steps]
    assert [len(batch) for batch in batches] == [4, 4, 4, 4, 4, 4, 4, 2]
    rows = [row for batch in batches for row in batch]
    epochs = [rows[start : start + 10] for start in (0, 10, 20)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert epochs[0] != epochs[1]
    assert rows_of_step(5, 10, 4, end=30, seed=3) == batches[4]
    assert rows_of_step(1, 10, 4, end=30, seed=4) != batches[0]
