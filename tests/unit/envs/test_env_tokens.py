import json

import pytest
from env_doubles import save_tokenizer

from treadle.envs.tokens import ChatTokenizer, resolve_tokenizer_folder
from treadle.errors import ModelError

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 2 + 2?"}]


def test_a_template_renders_and_encodes_to_the_text_it_wrote(tmp_path):
    tokenizer = ChatTokenizer.load(save_tokenizer(tmp_path))
    expected = (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhat is 2 + 2?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert tokenizer.has_template
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
    said = {"role": "user", "content": "<é>"}
    assert tokenizer.render([said, said]) == '<|im_start|>{"role": "user", "content": "<é>"}<|im_end|>4'
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
    assert not tokenizer.has_template
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
