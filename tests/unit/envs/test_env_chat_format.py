"""Chat templates and tokenizers, and tool calls in replies."""

from __future__ import annotations

import json

import pytest
from env_doubles import save_tokenizer
from hypothesis import given
from hypothesis import strategies as st

from treadle.envs.chat_format import (
    BrokenCall,
    ChatTokenizer,
    ToolCall,
    find_tool_calls,
    resolve_tokenizer_folder,
    without_tool_calls,
)
from treadle.envs.tasks.tools import calculate
from treadle.errors import ModelError

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 2 + 2?"}]


def test_a_template_renders_and_encodes_to_the_text_it_wrote(tmp_path):
    tokenizer = ChatTokenizer.load(save_tokenizer(tmp_path))
    expected = (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhat is 2 + 2?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert tokenizer.render(CHAT) == expected
    assert tokenizer.render(CHAT, add_generation_prompt=False) == expected.removesuffix("<|im_start|>assistant\n")
    ids = tokenizer.encode_chat(CHAT)
    num_special, special_characters = 5, 3 * len("<|im_start|>") + 2 * len("<|im_end|>")
    assert len(ids) == num_special + len(expected) - special_characters
    assert [ids[0], ids.count(256), ids.count(257)] == [256, 3, 2]
    assert tokenizer.decode(ids) == "system\nBe brief.\nuser\nWhat is 2 + 2?\nassistant\n"


def test_templates_get_the_special_tokens_and_functions_of_transformers(tmp_path):
    template = """
    {%- for message in messages %}
        {%- if message.role == "tool" %}{{ raise_exception("no tools here") }}{% endif %}
        {%- if loop.index0 == 1 %}{% break %}{% endif %}
        {%- generation %}{{ bos_token }}{{ message | tojson }}{{ eos_token }}{% endgeneration %}
    {%- endfor %}
    {{- strftime_now("%Y") | length }}"""
    tokenizer = ChatTokenizer.load(save_tokenizer(tmp_path, template))
    message = {"role": "user", "content": "<é>"}
    assert tokenizer.render([message, message]) == '<|im_start|>{"role": "user", "content": "<é>"}<|im_end|>4'
    with pytest.raises(ModelError, match="no tools here"):
        tokenizer.render([{"role": "tool", "content": "x"}])


def test_a_template_cannot_leave_its_sandbox(tmp_path):
    tokenizer = ChatTokenizer.load(save_tokenizer(tmp_path, "{{ messages.__class__.__mro__ }}{{ messages.clear() }}"))
    with pytest.raises(ModelError, match="refuses"):
        tokenizer.render(CHAT)


def test_a_template_without_an_end_is_an_error_instead_of_a_hang(tmp_path):
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    tokenizer = ChatTokenizer.load(save_tokenizer(tmp_path, endless))
    with pytest.raises(ModelError, match="of processor time"):
        tokenizer.encode_chat(CHAT)
    with pytest.raises(ModelError, match="of processor time"):  # constants are computed when it is parsed
        ChatTokenizer.load(save_tokenizer(tmp_path, "{{ 9**(9**9) }}"))


@pytest.mark.parametrize("as_list", [False, True])
def test_a_template_may_lie_in_the_tokenizer_settings(tmp_path, as_list):
    save_tokenizer(tmp_path, template=None)
    template = "{{ messages[0].content }}"
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": template}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named if as_list else template}))
    assert ChatTokenizer.load(tmp_path).render(CHAT) == "Be brief."


def test_without_a_template_the_prompt_is_the_plain_text(tmp_path):
    tokenizer = ChatTokenizer.load(save_tokenizer(tmp_path, template=None))
    assert tokenizer.render(CHAT) == "Be brief.\nWhat is 2 + 2?"
    assert tokenizer.decode(tokenizer.encode_chat(CHAT)) == "Be brief.\nWhat is 2 + 2?"


def test_a_broken_template_is_reported_with_its_folder(tmp_path):
    with pytest.raises(ModelError, match="cannot be parsed"):
        ChatTokenizer.load(save_tokenizer(tmp_path, "{% if %}"))


def test_a_folder_without_a_tokenizer_is_refused(tmp_path):
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        ChatTokenizer.load(tmp_path)


def test_the_tokenizer_is_looked_for_in_the_name_then_at_the_engine(tmp_path):
    mine, engines = save_tokenizer(tmp_path / "mine"), save_tokenizer(tmp_path / "engines")
    assert resolve_tokenizer_folder(str(mine), str(engines)) == mine
    assert resolve_tokenizer_folder("smollm2-135m-instruct", str(engines)) == engines


def test_a_tokenizer_that_is_nowhere_is_reported_with_a_remedy(tmp_path):
    with pytest.raises(ModelError, match="copy the model's tokenizer files"):
        resolve_tokenizer_folder("/no/such/model", str(tmp_path))


def call(name="search", **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


TEXTS = st.text() | st.sampled_from(["O'Hara's {\"x\": {}}", "</tool_call>", "<tool_call>{", 'a\\"b', "{{}}", "é\n"])


@given(st.lists(st.tuples(TEXTS.filter(bool), st.dictionaries(TEXTS, TEXTS | st.integers() | st.lists(TEXTS)))))
def test_whatever_stands_in_a_call_arrives_as_it_was(calls):
    text = "Let me see.\n".join(
        f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}\n</tool_call>"
        for name, arguments in calls
    )
    assert find_tool_calls(text) == [ToolCall(name, arguments) for name, arguments in calls]


def test_several_calls_in_one_turn_keep_their_order():
    text = f"First {call(query='a')} then {call('calculator', expression='1+1')}{call(query='b')} done"
    assert find_tool_calls(text) == [
        ToolCall("search", {"query": "a"}),
        ToolCall("calculator", {"expression": "1+1"}),
        ToolCall("search", {"query": "b"}),
    ]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('<tool_call>{"name": "now"}</tool_call>', ToolCall("now", {})),
        ('<tool_call>{"name": "a", "arguments": "{\\"b\\": \\"it\'s\\"}"}</tool_call>', ToolCall("a", {"b": "it's"})),
        ('<tool_call>{"name": "a", "arguments": {"b": "two\nlines"}}</tool_call>', ToolCall("a", {"b": "two\nlines"})),
        ('<tool_call>{"name": "a", "arguments": {}}', ToolCall("a", {})),  # the closing tag was cut off
    ],
)
def test_calls_as_models_also_write_them(text, found):
    assert find_tool_calls(text) == [found]


@pytest.mark.parametrize(
    ("inside", "problem"),
    [
        ("", "not JSON"),
        ("search Orla", "not JSON"),
        ("{'name': 'search', 'arguments': {'query': 'O\\'Hara'}}", "not JSON"),
        ('{"name": "search", "arguments": {"query": "a"}', "not JSON"),
        ('{"name": "search", "arguments": {"query": "a"}} please', "more behind"),
        ('{"name": "search", "arguments": {"n": NaN}}', "NaN is not JSON"),
        ('{"name": "search", "arguments": ["a"]}', "no object"),
        ('{"name": "search", "arguments": "not json"}', "no object"),
        ('{"name": 3, "arguments": {}}', "a call is"),
        ('{"arguments": {}}', "a call is"),
        ('["search"]', "a call is"),
        ("[" * 100_000, "not JSON"),
        ('{"name": "search", "arguments": {"n": ' + "9" * 5000 + "}}", "not JSON"),
    ],
)
def test_a_broken_call_says_what_is_wrong_and_leaves_the_next_one_whole(inside, problem):
    broken, after = find_tool_calls(f"<tool_call>{inside}</tool_call> and {call(query='x')}")
    assert isinstance(broken, BrokenCall)
    assert broken.text == inside
    assert problem in broken.problem
    assert after == ToolCall("search", {"query": "x"})


def test_the_words_before_the_first_call():
    assert without_tool_calls(f"Let me see. {call(query='a')} and {call(query='b')}") == "Let me see. "
    assert without_tool_calls("No call.") == "No call."


def test_a_text_without_calls_has_none():
    assert find_tool_calls("The tool_call would be {...}.") == []
    assert find_tool_calls("") == []


@given(st.text())
def test_no_text_is_too_odd(text):
    find_tool_calls(f"<tool_call>{text}")
    find_tool_calls(text)


@pytest.mark.parametrize(
    ("expression", "result"),
    [("1 + 2 * 3", 7), ("3*(14+8)", 66), ("-2 ** 2", -4), ("7 / 2", 3.5), ("8 / 2", 4), ("7 // 2", 3), ("7 % 4", 3),
     (" 2**10 ", 1024), ("+.5", 0.5), ("1e3", 1000), ("0.1 + 0.2", 0.1 + 0.2), ("10**30", 10**30)],
)  # fmt: skip
def test_the_calculator_computes(expression, result):
    assert calculate(expression) == result
    assert type(calculate(expression)) is type(result)


@pytest.mark.parametrize(
    ("expression", "problem"),
    [
        ("", "no arithmetic"), ("1 +", "no arithmetic"), ("two", "only numbers"), ("1 / 0", "division by zero"),
        ("5 % 0", "division by zero"), ("9**9**9**9", "exponent"), ("2**65", "exponent"), ("10**31", "too large"),
        ("10**30 * 10", "too large"), ("1e308 * 10", "too large"), ("1e999", "too large"), ("(-8) ** 0.5", "no number"),
        ("0 ** -1", "division by zero"), ("__import__('os')", "only numbers"), ("(1).real", "only numbers"),
        ("'a' * 9", "only numbers"), ("True + 1", "only numbers"), ("[1]", "only numbers"), ("1, 2", "only numbers"),
        ("lambda: 1", "only numbers"), ("1 if 1 else 2", "only numbers"), ("1" * 201, "at most 200"),
        ("(" * 200, "no arithmetic"), ("x := 1", "no arithmetic"), ("1 < 2", "only numbers"), ("\0", "no arithmetic"),
        ("1\0", "no arithmetic"), ("\ud800", "no arithmetic"), ("3j", "only numbers"), ("~1", "only numbers"),
        ("-" * 199 + "1", ""), ("2.5 << 3", "only numbers"),
    ],
)  # fmt: skip
def test_the_calculator_refuses_what_is_no_arithmetic(expression, problem):
    try:
        assert calculate(expression) in (1, -1)
        assert problem == ""
    except ValueError as error:
        assert problem in str(error)  # noqa: PT017  # one case may be computed or refused
