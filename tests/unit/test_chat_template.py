"""Chat templates are rendered in a process of their own: as transformers renders them, and within limits."""

from __future__ import annotations

import asyncio
import os
from contextlib import asynccontextmanager

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from treadle.chat_template import MAX_CPU_S, TemplateWorker
from treadle.errors import EngineError, RequestError

MESSAGES = [{"role": "user", "content": "Größe\n 数学"}, {"role": "assistant", "content": "7"}]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"a": [1, 2.5, None, True]}}}]
LIKE_REAL_ONES = """
{%- if tools %}
    {{- bos_token + (tools | tojson(indent=2)) }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'system' %}{% continue %}{% endif %}
    {{- '<|im_start|>' + message['role'] + '\\n' }}
    {%- if message.role == 'assistant' %}{% generation %}{{ message.content | trim }}{% endgeneration %}
    {%- else %}{{ message.content }}{% endif %}
{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
{{- strftime_now('%Y')[:2] }}{{ thinking is defined }}{{ documents is none }}
"""


@asynccontextmanager
async def worker():
    made = TemplateWorker()
    try:
        yield made
    finally:
        made.close()


def test_it_renders_what_transformers_renders():
    options = {"add_generation_prompt": True, "bos_token": "<s>", "thinking": True}

    async def scenario():
        async with worker() as made:
            for tools in (TOOLS, None):
                values = {"messages": MESSAGES, "tools": tools, "documents": None, **options}
                ((expected,), _) = render_jinja_template(
                    [MESSAGES], tools=tools, chat_template=LIKE_REAL_ONES, **options
                )
                assert await made.render_async(LIKE_REAL_ONES, values) == expected

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "of processor time"),
        ("{{ 'x' * 5000000000 }}", "of memory"),
        ("{% for a in range(99999) %}{{ 'x' * 10000 }}{% endfor %}", "more than 16,777,216 characters"),
        ("{{ raise_exception('roles must alternate') }}", "refuses these messages: roles must alternate"),
        ("{{ ''.__class__.__mro__ }}", "refuses these messages"),
        ("{% for", "cannot be parsed"),
        ("{{ 9**(9**9) }}", "of processor time"),
        ("{{ '\\ud800' }}", "refuses these messages"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "refuses these messages"),
    ],
)
def test_a_template_that_hits_a_limit_or_refuses_is_a_sentence(source, message):
    async def scenario():
        async with worker() as made:
            with pytest.raises(RequestError, match=message):
                await made.render_async(source, {"messages": MESSAGES})
            assert await made.render_async("{{ messages[1].content }}", {"messages": MESSAGES}) == "7"

    asyncio.run(scenario())


def test_conversations_at_once_get_their_own_answers_from_one_process():
    async def scenario():
        async with worker() as made:
            await made.render_async("", {})
            process = made._process
            asked = [made.render_async("{{ number }}", {"number": number}) for number in range(50)]
            assert await asyncio.gather(*asked) == [str(number) for number in range(50)]
            assert made._process is process

    asyncio.run(scenario())


def test_a_caller_that_leaves_gets_nobody_elses_answer():
    async def scenario():
        async with worker() as made:
            left = asyncio.ensure_future(made.render_async("{% for a in range(99999) %}{{ a }}{% endfor %}", {}))
            await asyncio.sleep(0)
            left.cancel()
            assert await made.render_async("{{ 1 + 1 }}", {}) == "2"

    asyncio.run(scenario())


def test_a_process_that_was_killed_is_started_again():
    async def scenario():
        async with worker() as made:
            assert await made.render_async("a", {}) == "a"
            os.kill(made._process.pid, 9)
            with pytest.raises(EngineError, match="has ended"):
                await made.render_async("a", {})
            assert await made.render_async("a", {}) == "a"

    asyncio.run(scenario())


def test_its_process_ends_with_its_server():
    made = TemplateWorker()
    made.render("", {})
    made._link.close()  # as the end of the server closes it
    assert made._process.wait(30 + MAX_CPU_S) == 0


def test_values_that_are_no_json_are_a_sentence():
    made = TemplateWorker()
    for value in (object(), "\ud800"):
        with pytest.raises(RequestError, match="cannot be written as JSON"):
            made.render("", {"messages": [{"content": value}]})
