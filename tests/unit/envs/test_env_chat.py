"""Chats keep the exact tokens: what was sampled stays as it was sampled, each turn's end appears once."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import pytest
from env_doubles import CHAT_TEMPLATE, save_tokenizer

from treadle.envs.chat import Model, RolloutSampling
from treadle.envs.chat_format import ChatTokenizer
from treadle.envs.engine_client import Completion, EngineResult
from treadle.errors import ModelError, RequestError

USER = {"role": "user", "content": "Hi"}
# As several model families do it: thoughts of earlier turns are dropped from the prompt, and the last turn gets an
# empty block of thoughts when it has none.
FORGETFUL = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}"
    "{{ message.content.split('</think>')[-1] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass
class Script:
    """An engine that says given texts, one a call, and ends each turn itself unless it is cut off."""

    tokenizer: ChatTokenizer
    says: list[str]
    cut_off: bool = False
    prompts: list[list[int]] = field(default_factory=list)
    asked: list[dict] = field(default_factory=list)

    async def generate(self, prompt_token_ids, *, n=1, max_tokens, temperature, seed=None, stop=(), conversation=""):
        self.prompts.append(list(prompt_token_ids))
        self.asked.append({"max_tokens": max_tokens, "seed": seed, "stop": stop})
        text = self.says.pop(0)
        ids = self.tokenizer.encode_text(text + ("" if self.cut_off else "<|im_end|>"))
        reason = "length" if self.cut_off else "stop"
        return EngineResult([Completion(ids, [-0.25] * len(ids), text, reason, len(self.prompts))], 0.5)


def engine_and_model(tmp_path, *says, template=CHAT_TEMPLATE, cut_off=False, **sampling):
    tokenizer = ChatTokenizer.load(save_tokenizer(tmp_path / "model", template))
    engine = Script(tokenizer, list(says), cut_off)
    return engine, Model(
        engine, tokenizer, RolloutSampling(**{"max_tokens": 64, "temperature": 1.0, "seed": 7, **sampling})
    )


def whole_text(model, transcript):
    return model.tokenizer.decode(transcript.tokens, skip_special_tokens=False)


def trained_text(model, transcript):
    return model.tokenizer.decode([t for t in transcript.masks if t != -100], skip_special_tokens=False)


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, FORGETFUL])
def test_every_turn_is_kept_as_it_was_sampled(tmp_path, template):
    first = "<think>hm</think>call"
    engine, model = engine_and_model(tmp_path, first, "four", template=template)

    async def talk():
        chat = model.chat([USER])
        assert (await chat.ask()).text == first
        chat.add({"role": "tool", "content": "2+2=4"})
        return await chat.ask()

    assert asyncio.run(talk()).text == "four"
    (transcript,) = model.transcripts
    assert whole_text(model, transcript) == (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
        f"{first}<|im_end|>\n<|im_start|>tool\n2+2=4<|im_end|>\n<|im_start|>assistant\nfour<|im_end|>"
    )
    assert trained_text(model, transcript) == f"{first}<|im_end|>four<|im_end|>"
    assert [m == -100 for m in transcript.masks] == [lp == 1.0 for lp in transcript.logprobs]
    assert transcript.policy_versions == {1, 2}
    assert engine.prompts[1][: len(engine.prompts[0])] == engine.prompts[0]
    assert transcript.tokens[: len(engine.prompts[1])] == engine.prompts[1]  # what was trained is what was seen
    assert [message["role"] for message in transcript.messages] == ["user", "assistant", "tool", "assistant"]


def test_a_turn_that_was_cut_off_is_ended_for_the_model_untrained(tmp_path):
    _, model = engine_and_model(tmp_path, "one two", "three", cut_off=True)

    async def talk():
        chat = model.chat([USER])
        await chat.ask()
        chat.add({"role": "user", "content": "go on"})
        await chat.ask()

    asyncio.run(talk())
    (transcript,) = model.transcripts
    assert "one two<|im_end|>\n<|im_start|>user" in whole_text(model, transcript)
    assert trained_text(model, transcript) == "one twothree"
    assert transcript.finish_reason == "length"


def test_turns_draw_different_numbers_and_replies_fit_into_the_sequence(tmp_path):
    engine, model = engine_and_model(tmp_path, "a", "b", longest_sequence=150, max_tokens=100)

    async def talk():
        chat = model.chat([USER])
        await chat.ask(stop=["\n"], max_tokens=20)
        chat.add({"role": "user", "content": "x" * 30})
        await chat.ask()
        chat.add({"role": "user", "content": "y" * 100})
        return await chat.ask()

    last = asyncio.run(talk())
    assert (last.text, last.finish_reason, last.num_tokens) == ("", "length", 0)
    assert [asked["seed"] for asked in engine.asked] == [7, 8]
    assert engine.asked[0] == {"max_tokens": 20, "seed": 7, "stop": ["\n"]}
    assert engine.asked[1]["max_tokens"] == 150 - len(engine.prompts[1])
    assert model.transcripts[0].finish_reason == "length"


def test_every_chat_that_sampled_something_is_a_sequence(tmp_path):
    _, model = engine_and_model(tmp_path, "a", "b")

    async def talk():
        for _ in range(2):
            await model.chat([USER]).ask()
        model.chat([USER])

    asyncio.run(talk())
    assert [trained_text(model, transcript)[0] for transcript in model.transcripts] == ["a", "b"]
    assert model.seconds == 1.0


def test_the_model_does_not_speak_twice(tmp_path):
    _, model = engine_and_model(tmp_path, "a", "b")

    async def talk():
        chat = model.chat([USER])
        await chat.ask()
        await chat.ask()

    with pytest.raises(RequestError, match="add a message"):
        asyncio.run(talk())


def test_a_template_that_drops_earlier_turns_is_refused(tmp_path):
    only_last = "{{ messages[-1].content }}{% if add_generation_prompt %}:{% endif %}"
    _, model = engine_and_model(tmp_path, "a", "b", template=only_last)

    async def talk():
        chat = model.chat([USER])
        await chat.ask()
        chat.add(USER)
        await chat.ask()

    with pytest.raises(ModelError, match="drops what an assistant said"):
        asyncio.run(talk())


def test_without_a_template_turns_are_lines(tmp_path):
    _, model = engine_and_model(tmp_path, "a", "b", template=None, cut_off=True)

    async def talk():
        chat = model.chat([USER])
        await chat.ask()
        chat.add({"role": "user", "content": "more"})
        await chat.ask()

    asyncio.run(talk())
    assert whole_text(model, model.transcripts[0]) == "Hia\nmore\nb"


def test_tools_are_described_by_the_template(tmp_path):
    template = "{% if tools %}Tools: {{ tools[0].name }}\n{% endif %}" + CHAT_TEMPLATE
    engine, model = engine_and_model(tmp_path, "a", template=template)
    asyncio.run(model.chat([USER], tools=[{"name": "add"}]).ask())
    assert model.tokenizer.decode(engine.prompts[0], skip_special_tokens=False).startswith("Tools: add\n")
