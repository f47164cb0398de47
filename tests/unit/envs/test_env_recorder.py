"""The recorder, through the real client of OpenAI and a real socket: what an agent says is kept token by token."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import httpx
import openai
import pytest
from env_doubles import save_tokenizer
from tokenizers import Tokenizer

from treadle.envs.base import Item, Score
from treadle.envs.chat import Model, RolloutSampling
from treadle.envs.chat_format import ChatTokenizer
from treadle.envs.engine_client import Completion, EngineResult
from treadle.envs.foreign.recorder import Recorder, serving
from treadle.envs.foreign.sessions import Session, SessionAbandoned, Sessions
from treadle.envs.rollout import Rollout, build_group
from treadle.errors import EngineError

END = "<|im_end|>"
CALL = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "add", "description": "a + b", "parameters": {"type": "object"}}}]
ITEM = Item.ask("What is 2 + 3?", answer="5")
QUESTION = {"role": "user", "content": "What is 2 + 3?"}


@dataclass
class Script:
    """An engine at its port: says the next of its lines, and ends its turn as a model does."""

    tokenizer: Tokenizer
    lines: list[str | Exception]
    calls: list[dict] = field(default_factory=list)
    go: asyncio.Event = field(default_factory=asyncio.Event)
    num_given_up: int = 0
    hangs_at: int | None = None  # the call, counted from 1, that is never answered

    async def generate(self, prompt_token_ids, *, n=1, max_tokens, temperature, seed=None, stop=(), conversation=""):
        prompt = self.tokenizer.decode(list(prompt_token_ids), skip_special_tokens=False)
        self.calls.append({"prompt": prompt, "max_tokens": max_tokens, "temperature": temperature, "seed": seed})
        try:
            await (asyncio.Event() if len(self.calls) == self.hangs_at else self.go).wait()
        except asyncio.CancelledError:
            self.num_given_up += 1
            raise
        line = self.lines.pop(0)
        if isinstance(line, Exception):
            raise line
        ids = [*self.tokenizer.encode(line).ids, self.tokenizer.token_to_id(END)][:max_tokens]
        reason = "length" if len(ids) == max_tokens else "stop"
        return EngineResult([Completion(ids, [-0.25 * (i + 1) for i in range(len(ids))], line, reason, 4)], 0.1)


@dataclass
class Stage:
    url: str
    session: Session
    engine: Script
    sessions: Sessions
    client: openai.AsyncOpenAI

    async def chat(self, *messages, **wishes):
        return await self.client.chat.completions.create(model="any", messages=list(messages), **wishes)

    def text(self, number=0):
        tokens = self.session.model.transcripts[number].tokens
        return self.engine.tokenizer.decode(tokens, skip_special_tokens=False)

    def trained(self, number=0):
        """The text of what is trained on, run by run."""
        runs, previous = [], -100
        for token in self.session.model.transcripts[number].masks:
            if token >= 0 and previous < 0:
                runs.append([])
            if token >= 0:
                runs[-1].append(token)
            previous = token
        return [self.engine.tokenizer.decode(run, skip_special_tokens=False) for run in runs]


def client_of(url):
    """To be closed within its event loop, by `async with`."""
    return openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0)


def run_scenario(tmp_path, lines, scenario, *, temperature=1.0, longest_sequence=0, assigns_items=False):
    """Run `scenario(stage)` against a recorder whose engine says `lines`."""
    folder = save_tokenizer(tmp_path)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_truncation()

    @asynccontextmanager
    async def stage():
        engine = Script(tokenizer, list(lines))
        engine.go.set()
        sampling = RolloutSampling(max_tokens=100, temperature=temperature, seed=7, longest_sequence=longest_sequence)
        model = Model(engine, ChatTokenizer.load(folder), sampling)
        sessions = Sessions()
        async with serving(Recorder(sessions, assigns_items=assigns_items).app, "127.0.0.1", 0) as url:
            with sessions.open(model, ITEM) as session:
                async with client_of(f"{url}/{session.key}/v1") as client:
                    yield Stage(url, session, engine, sessions, client)

    async def run_on_stage():
        async with asyncio.timeout(60), stage() as on:
            await scenario(on)

    asyncio.run(run_on_stage())


def test_a_chat_with_a_tool_call_is_one_sequence_with_only_replies_trained(tmp_path):
    async def scenario(on):
        first = await on.chat(QUESTION, tools=TOOLS)
        message = first.choices[0].message
        assert first.choices[0].finish_reason == "tool_calls"
        assert message.content is None
        call = message.tool_calls[0]
        assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 2, "b": 3})
        result = {"role": "tool", "tool_call_id": call.id, "content": "5"}
        # As most agents do it: the message goes back with every field that its type has.
        second = await on.chat(QUESTION, message.model_dump(), result, tools=TOOLS)
        assert second.choices[0].message.content == "It is 5."
        assert second.usage.completion_tokens == len("It is 5.") + 1

        assert len(on.session.model.transcripts) == 1
        assert on.text() == (
            f"<|im_start|>user\nWhat is 2 + 3?{END}\n<|im_start|>assistant\n{CALL}{END}\n"
            f"<|im_start|>tool\n5{END}\n<|im_start|>assistant\nIt is 5.{END}"
        )
        assert on.trained() == [f"{CALL}{END}", f"It is 5.{END}"]
        transcript = on.session.model.transcripts[0]
        assert [logprob == 1.0 for logprob in transcript.logprobs] == [mask < 0 for mask in transcript.masks]
        assert on.engine.calls[0]["seed"] != on.engine.calls[1]["seed"]

    run_scenario(tmp_path, [CALL, "It is 5."], scenario)


@pytest.mark.parametrize(
    "sent_back",
    [
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"function": {"name": "add", "arguments": '{"b":3,"a":2}'}}],
        },
        {
            "role": "assistant",
            "tool_calls": [{"function": {"name": "add", "arguments": '{"a": 2, "b": 3}'}, "id": "x"}],
        },
    ],
)
def test_a_tool_call_is_known_again_however_the_agent_writes_it(tmp_path, sent_back):
    async def scenario(on):
        await on.chat(QUESTION, tools=TOOLS)
        await on.chat(QUESTION, sent_back, {"role": "tool", "tool_call_id": "x", "content": "5"}, tools=TOOLS)
        assert len(on.session.model.transcripts) == 1

    run_scenario(tmp_path, [CALL, "It is 5."], scenario)


@pytest.mark.parametrize("expected_text", ["<tool_call>{oops}</tool_call>", f"{CALL}<tool_call>?</tool_call>"])
def test_a_call_that_cannot_be_read_stays_text(tmp_path, expected_text):
    async def scenario(on):
        choice = (await on.chat(QUESTION, tools=TOOLS)).choices[0]
        assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (
            expected_text,
            None,
            "stop",
        )

    run_scenario(tmp_path, [expected_text], scenario)


def test_without_tools_a_reply_is_only_text(tmp_path):
    async def scenario(on):
        assert (await on.chat(QUESTION)).choices[0].message.content == CALL
        assert (await on.chat(QUESTION, tools=TOOLS, tool_choice="none")).choices[0].message.content == CALL

    run_scenario(tmp_path, [CALL, CALL], scenario)


def test_an_earlier_turn_that_was_changed_begins_a_sequence_of_its_own(tmp_path):
    async def scenario(on):
        await on.chat(QUESTION)
        await on.chat(QUESTION, {"role": "assistant", "content": "Six."}, {"role": "user", "content": "Sure?"})
        await on.chat(QUESTION, {"role": "assistant", "content": "Five."}, {"role": "user", "content": "Sure?"})
        assert [on.trained(i) for i in range(2)] == [[f"Five.{END}", f"Yes.{END}"], [f"No.{END}"]]
        assert "Six." in on.text(1)

    run_scenario(tmp_path, ["Five.", "No.", "Yes."], scenario)


def test_several_choices_are_branches_and_what_they_share_is_trained_once(tmp_path):
    async def scenario(on):
        await on.chat(QUESTION)
        sure = {"role": "user", "content": "Sure?"}
        known = [QUESTION, {"role": "assistant", "content": "Five."}, sure]
        both = await on.chat(*known, n=2)
        assert [choice.message.content for choice in both.choices] == ["Yes.", "No."]
        await on.chat(*known, {"role": "assistant", "content": "No."}, {"role": "user", "content": "Why?"})
        assert on.trained(0) == [f"Five.{END}", f"Yes.{END}"]
        assert on.trained(1) == [f"No.{END}", f"Because.{END}"]
        assert on.text(1).startswith(on.text(0).removesuffix(f"Yes.{END}"))

    run_scenario(tmp_path, ["Five.", "Yes.", "No.", "Because."], scenario)


def test_a_stream_says_the_same_as_a_whole_answer(tmp_path):
    async def scenario(on):
        stream = await on.chat(QUESTION, tools=TOOLS, stream=True, stream_options={"include_usage": True})
        chunks = [chunk async for chunk in stream]
        deltas = [choice.delta for chunk in chunks for choice in chunk.choices]
        call = next(call for delta in deltas for call in delta.tool_calls or ())
        assert call.function.name == "add"
        reasons = [choice.finish_reason for chunk in chunks for choice in chunk.choices]
        assert reasons == [None, "tool_calls"]
        assert chunks[-1].usage.completion_tokens == len(CALL) + 1
        assert on.trained() == [f"{CALL}{END}"]
        text = [chunk async for chunk in await on.client.completions.create(model="m", prompt="Once", stream=True)]
        assert text[0].choices[0].text == " upon"

    run_scenario(tmp_path, [CALL, " upon"], scenario)


def test_logprobs_and_token_ids_are_those_that_are_recorded(tmp_path):
    async def scenario(on):
        answer = await on.chat(QUESTION, logprobs=True, extra_body={"return_token_ids": True})
        transcript = on.session.model.transcripts[0]
        choice = answer.choices[0]
        assert [entry.logprob for entry in choice.logprobs.content] == [-0.25, -0.5, -0.75]
        assert choice.model_extra["token_ids"] == transcript.tokens[-3:]
        assert answer.model_extra["prompt_token_ids"] == transcript.tokens[:-3]

    run_scenario(tmp_path, ["ab"], scenario)


def test_an_agents_own_temperature_is_used_and_sent_with_its_sequence(tmp_path):
    async def scenario(on):
        await on.chat(QUESTION, temperature=1.0)
        known = [QUESTION, {"role": "assistant", "content": "Five."}, {"role": "user", "content": "Sure?"}]
        await on.chat(*known, temperature=0.5)
        assert [call["temperature"] for call in on.engine.calls] == [1.0, 0.5]
        rollout = Rollout(on.session.model.transcripts, Score(1.0, is_right=True), 0.0)
        assert build_group([rollout], temperature=1.0).overrides == [{}, {"temperature": 0.5}]
        assert on.trained(1) == [f"Yes.{END}"]

    run_scenario(tmp_path, ["Five.", "Yes."], scenario)


@pytest.mark.parametrize(
    ("wishes", "expected_text"),
    [
        ({"temperature": 0}, "leave it out"),
        ({"temperature": 1e-30}, "must be 0.05 to 2"),
        ({"temperature": 2.5}, "must be 0.05 to 2"),
        ({"top_p": 0.9}, "another distribution"),
        ({"frequency_penalty": 0.5}, "another distribution"),
        ({"tool_choice": "required", "tools": TOOLS}, "a tool cannot be forced"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"extra_body": {"best_wishes": 1}}, "best_wishes"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stop": ["x"] * 17}, "at most 16 strings"),
        ({"stop": "x" * 1001}, "1 to 1000 characters"),
        ({"stop": ["x", ""]}, "1 to 1000 characters"),
        ({"n": 65}, "n must be 1 to 64"),
        ({"extra_headers": {"X-Session-ID": "x" * 256}}, "X-Session-ID has more than 255 characters"),
    ],
)
def test_what_training_cannot_follow_is_refused_in_openais_shape(tmp_path, wishes, expected_text):
    async def scenario(on):
        with pytest.raises(openai.BadRequestError) as refused:
            await on.chat(QUESTION, **wishes)
        assert expected_text in refused.value.body["message"]
        assert refused.value.body["type"] == "invalid_request_error"
        assert on.session.model.transcripts == []

    run_scenario(tmp_path, [], scenario)


@pytest.mark.parametrize(
    ("body", "expected_text"),
    [
        (b'{"messages": [{"role": "user", "content": "\xff"}]}', "not UTF-8"),
        (b'{"messages": [{"role": "user", "content": %s}]}' % (b"[" * 20_000 + b"]" * 20_000), "nested too deeply"),
        (b'{"messages": [{"role": "user", "content": "x", "tool_calls": 5}]}', "tool_calls of a message must be"),
        (b'{"messages": [{"role": "user", "content": "x", "name": ["a"]}]}', "the name of a message must be text"),
        (b'{"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "%s"}}]}]}'
         % (b"[" * 100_000 + b"]" * 100_000), "nested too deeply"),
        (b'{"messages": [{"role": "user", "content": [%s{}]}]}' % (b"{}," * 2**20), "at most 1048576 objects"),
        (b'{"messages": [%s{}]}' % (b"{}," * 2**14), "at most 16384 messages"),
        (b'{"messages": [{"role": "user", "name": "%s"}]}' % (b"x" * 256), "name of a message has more than 255"),
        (b'{"messages": [{"role": "%s"}]}' % (b"x" * 256), "role of a message has more than 255"),
        (b'{"messages": [{"role": "tool", "tool_call_id": "%s"}]}' % (b"x" * 256), "tool_call_id of a message has"),
        (b'{"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "%s"}}]}]}' % (b"x" * 256),
         "name of a function has more than 255"),
        (b'{"model": "%s", "messages": []}' % (b"x" * 4097), "length <= 4096"),
    ],
    ids=["no UTF-8", "deep", "calls", "name", "deep arguments", "parts", "messages", "long name", "long role",
         "long id", "long function", "long model"],
)  # fmt: skip
def test_a_body_that_cannot_be_read_is_the_senders_mistake(tmp_path, body, expected_text):
    async def scenario(on):
        async with httpx.AsyncClient() as http:
            answer = await http.post(f"{on.url}/{on.session.key}/v1/chat/completions", content=body)
        assert answer.status_code == 400, answer.text
        assert expected_text in answer.json()["error"]["message"]
        assert answer.json()["error"]["type"] == "invalid_request_error"

    run_scenario(tmp_path, ["Five."], scenario)


def test_a_session_keeps_a_bounded_number_of_replies_tokens_and_characters(tmp_path, monkeypatch):
    async def scenario(on):
        async def refused(**more):
            with pytest.raises(openai.APIStatusError) as full:
                await on.chat({"role": "user", "content": "Another question"}, **more)
            assert full.value.status_code == 413
            return full.value.body["message"]

        await on.chat(QUESTION)
        monkeypatch.setattr("treadle.envs.foreign.sessions.MAX_REPLIES", 2)
        assert "at most 2 replies" in await refused(n=2)
        monkeypatch.setattr("treadle.envs.foreign.sessions.MAX_TOKENS", 5)
        assert "at most 5 tokens" in await refused()
        monkeypatch.setattr("treadle.envs.foreign.sessions.MAX_TOKENS", 2**22)
        monkeypatch.setattr("treadle.envs.foreign.sessions.MAX_CHARS", 50)
        assert "at most 50 characters" in await refused(tools=TOOLS)
        assert on.trained() == [f"Five.{END}"]
        known = [QUESTION, {"role": "assistant", "content": "Five."}, {"role": "user", "content": "Sure?"}]
        await on.chat(*known)  # what it continues is counted once
        assert on.trained() == [f"Five.{END}", f"Yes.{END}"]

    run_scenario(tmp_path, ["Five.", "Yes."], scenario)


def test_calls_that_fail_leave_nothing_in_their_session(tmp_path):
    async def scenario(on):
        for number in range(3):
            with pytest.raises(openai.BadRequestError):
                await on.chat({"role": "user", "content": f"{number}" * 1000}, n=2)
            with pytest.raises(openai.BadRequestError):
                await on.client.completions.create(model="m", prompt=f"{number}" * 1000)
        assert (on.session._conversations, on.session.model.chats) == ([], [])
        await on.chat({"role": "user", "content": "?"})
        assert len(on.session._conversations) == len(on.session.model.chats) == 1

    run_scenario(tmp_path, ["Yes."], scenario, longest_sequence=100)


def test_evaluations_are_greedy_when_agents_ask_for_it(tmp_path):
    async def scenario(on):
        await on.chat(QUESTION, temperature=0)
        assert on.engine.calls[0]["temperature"] == 0

    run_scenario(tmp_path, ["Five."], scenario, temperature=0.0)


def test_completions_go_on_from_text_and_from_token_ids(tmp_path):
    async def scenario(on):
        create = on.client.completions.create
        first = await create(model="m", prompt="Once", logprobs=0, max_tokens=5)
        assert first.choices[0].text == " upon"
        assert first.choices[0].finish_reason == "length"
        second = await create(model="m", prompt="Once upon a time", max_tokens=4)
        assert (second.choices[0].text, second.choices[0].finish_reason) == (" the", "length")
        assert on.text() == "Once upon a time the"
        assert on.trained() == [" upon", " the"]
        tokens = on.session.model.transcripts[0].tokens
        await create(model="m", prompt=[*tokens, *on.engine.tokenizer.encode("!").ids])
        assert on.trained() == [" upon", " the", f" End.{END}"]
        await create(model="m", prompt="Another")
        assert len(on.session.model.transcripts) == 2

    run_scenario(tmp_path, [" upon", " the", " End.", " one"], scenario)


def test_after_an_end_that_the_agent_does_not_see_a_new_sequence_starts(tmp_path):
    async def scenario(on):
        create = on.client.completions.create
        await create(model="m", prompt="Once")
        await create(model="m", prompt="Once upon a time")
        assert on.engine.calls[-1]["prompt"] == "Once upon a time"
        assert [on.text(i) for i in range(2)] == [f"Once upon{END}", f"Once upon a time the{END}"]
        # Who sends the end along means it.
        tokens = on.session.model.transcripts[0].tokens
        await create(model="m", prompt=[*tokens, *on.engine.tokenizer.encode("!").ids])
        assert on.text(0) == f"Once upon{END}! End.{END}"

    run_scenario(tmp_path, [" upon", " the", " End."], scenario)


def test_a_conversation_without_room_gets_the_error_of_openai(tmp_path):
    async def scenario(on):
        first = await on.chat(QUESTION)
        assert first.choices[0].finish_reason == "length"
        cut = first.choices[0].message.model_dump()
        with pytest.raises(openai.BadRequestError) as refused:
            await on.chat(QUESTION, cut, {"role": "user", "content": "Go on"})
        assert refused.value.code == "context_length_exceeded"
        assert on.session.model.transcripts[0].finish_reason == "length"

    run_scenario(tmp_path, ["Five."], scenario, longest_sequence=len("?user\nWhat is 2 + 3??\n?assistant\n") + 4)


async def give_up(on, call, num_calls):
    """Cancel the agent's call once the engine was asked this many times, and wait until the engine knows."""
    asking = asyncio.ensure_future(call)
    while len(on.engine.calls) < num_calls or (on.engine.hangs_at and len(on.engine.lines) > 2):
        await asyncio.sleep(0.01)
    asking.cancel()
    while not on.engine.num_given_up:
        await asyncio.sleep(0.01)


def test_a_cancelled_call_leaves_nothing_and_can_be_repeated(tmp_path):
    async def scenario(on):
        await on.chat(QUESTION)
        known = [QUESTION, {"role": "assistant", "content": "Five."}, {"role": "user", "content": "Sure?"}]
        on.engine.go.clear()
        await give_up(on, on.chat(*known), num_calls=2)
        on.engine.go.set()
        await on.chat(*known)
        assert on.trained() == [f"Five.{END}", f"Yes.{END}"]
        assert on.text().count("Sure?") == 1

    run_scenario(tmp_path, ["Five.", "Yes."], scenario)


def test_several_choices_are_kept_only_when_all_of_them_are_there(tmp_path):
    async def scenario(on):
        await on.chat(QUESTION)
        known = [QUESTION, {"role": "assistant", "content": "Five."}, {"role": "user", "content": "Sure?"}]
        on.engine.hangs_at = 3
        await give_up(on, on.chat(*known, n=2), num_calls=3)
        assert len(on.engine.lines) == 2  # one of the two had been said
        assert [on.trained(i) for i in range(len(on.session.model.transcripts))] == [[f"Five.{END}"]]
        assert on.session.model.last_completion.text == "Five."  # which rewards judge
        on.engine.hangs_at = None
        both = await on.chat(*known, n=2)
        assert [choice.message.content for choice in both.choices] == ["Yes.", "No."]
        assert [on.trained(i) for i in range(2)] == [[f"Five.{END}", f"Yes.{END}"], [f"No.{END}"]]

    run_scenario(tmp_path, ["Five.", "Given up.", "Yes.", "No."], scenario)


def test_calls_side_by_side_are_sequences_of_their_own(tmp_path):
    async def scenario(on):
        await asyncio.gather(on.chat(QUESTION), on.chat(QUESTION))
        assert sorted(on.trained(0) + on.trained(1)) == [f"Five.{END}", f"Six.{END}"]

    run_scenario(tmp_path, ["Five.", "Six."], scenario)


def test_an_engine_that_is_gone_fails_the_rollout_and_not_the_agent(tmp_path):
    async def scenario(on):
        with pytest.raises(openai.InternalServerError, match="the engine is away"):
            await on.chat(QUESTION)
        with pytest.raises(EngineError, match="the engine is away"):
            on.session.score.result()

    run_scenario(tmp_path, [EngineError("the engine is away")], scenario)


def test_a_score_ends_a_session(tmp_path):
    async def scenario(on):
        await on.chat(QUESTION)
        async with httpx.AsyncClient(base_url=f"{on.url}/{on.session.score_key}") as http:
            assert (await http.post("/score", json={"score": "much"})).status_code == 400
            body = {"score": 0.5, "is_right": False, "parts": {"style": 0.25}}
            assert (await http.post("/score", json=body)).status_code == 200
            assert (await http.post("/score", json=body)).status_code == 200  # the answer may have been lost
            assert (await http.post("/score", json={"score": 1.0})).status_code == 410
        assert on.session.score.result() == Score(0.5, is_right=False, parts={"style": 0.25})
        with pytest.raises(openai.APIStatusError, match="this session has ended"):
            await on.chat(QUESTION)

    run_scenario(tmp_path, ["Five."], scenario)


def test_who_may_speak_to_the_model_may_not_judge_what_it_says(tmp_path):
    async def scenario(on):
        async with httpx.AsyncClient(base_url=on.url) as http:
            listed = (await http.get("/sessions")).text
            assert on.session.key not in listed
            assert on.session.score_key not in listed
            on.sessions.by_client["player"] = on.session
            for address in (on.session.key, "shared"):
                headers = {"X-Session-ID": "player"}
                assert (await http.post(f"/{address}/score", json={"score": 1.0}, headers=headers)).status_code == 404
            assert (await http.delete(f"/{on.session.key}")).status_code == 410  # nor spare itself the score
            assert (await http.get(f"/{on.session.score_key}/v1/models")).status_code == 404
        assert not on.session.score.done()

    run_scenario(tmp_path, [], scenario)


def test_samples_that_run_when_the_score_arrives_are_not_in_the_rollout(tmp_path):
    async def scenario(on):
        await on.chat(QUESTION)
        on.engine.go.clear()
        late = asyncio.ensure_future(on.chat({"role": "user", "content": "By the way"}))
        while len(on.engine.calls) < 2:
            await asyncio.sleep(0.01)
        on.session.finish(Score(1.0, is_right=True))
        on.engine.go.set()
        with pytest.raises(openai.APIStatusError, match="this session has ended"):
            await late
        assert len(on.session.model.transcripts) == 1

    run_scenario(tmp_path, ["Five.", "Late."], scenario)


def test_external_agents_use_the_routes_of_atropos_proxy(tmp_path):
    async def scenario(on):
        on.sessions.offer(on.session)
        async with httpx.AsyncClient(base_url=on.url) as http:
            assert (await http.get("/health")).json() == {"status": "ok", "sessions": 1}
            made = (await http.post("/sessions/create", json={"tool_parser": "hermes", "track_tree": False})).json()
            assert made["uuid"] == on.session.key
            assert on.session.taken.is_set()
            assert made["base_url"] == f"{on.url}/{on.session.key}/v1"
            assert made["score_url"] == f"{on.url}/{on.session.score_key}/score"
            assert made["item"] == {"messages": [QUESTION], "answer": "5", "metadata": {}}
            await on.chat(QUESTION)
            (node,) = (await http.get(f"/{made['uuid']}/nodes")).json()["nodes"]
            assert (node["tokens"], node["masked_tokens"]) == (
                on.session.model.transcripts[0].tokens,
                on.session.model.transcripts[0].masks,
            )
            assert node["metadata"] == {"finish_reason": "stop"}
            (listed,) = (await http.get("/sessions")).json()["sessions"]
            assert made["uuid"].startswith(listed["uuid"].removesuffix("..."))
            assert (await http.delete(f"/{made['uuid']}")).status_code == 200
        with pytest.raises(SessionAbandoned):
            on.session.score.result()

    run_scenario(tmp_path, ["Five."], scenario, assigns_items=True)


def test_agents_that_share_a_url_are_distinguished_and_can_be_discarded(tmp_path):
    async def scenario(on):
        async def ask(speaker):
            headers = {"X-Session-ID": speaker}
            async with client_of(f"{on.url}/shared/v1") as client:
                return await client.chat.completions.create(model="m", messages=[QUESTION], extra_headers=headers)

        with pytest.raises(openai.NotFoundError):
            await ask("player")
        for speaker in ("player", "judge"):
            on.sessions.by_client[speaker] = on.session
            await ask(speaker)
        assert [on.trained(i) for i in range(2)] == [[f"Five.{END}"], [f"Good.{END}"]]
        assert on.session.model.last_completion.text == "Good."
        on.session.discard(["judge"])
        assert on.session.model.last_completion.text == "Five."
        assert [on.trained(i) for i in range(len(on.session.model.transcripts))] == [[f"Five.{END}"]]

    run_scenario(tmp_path, ["Five.", "Good."], scenario)


def test_a_session_that_never_was_is_not_found(tmp_path):
    async def scenario(on):
        async with client_of(f"{on.url}/nonsense/v1") as client:
            with pytest.raises(openai.NotFoundError):
                await client.models.list()
        assert [model.id async for model in on.client.models.list()] == ["policy"]
        async with httpx.AsyncClient() as http:
            assert (await http.post(f"{on.url}/sessions/create")).status_code == 410
            page = await http.get(f"{on.url}/sessions", headers={"Origin": "http://evil.example"})
            assert page.status_code == 403

    run_scenario(tmp_path, [], scenario)


def test_no_foreign_page_reaches_the_recorder_and_its_url_can_be_called(monkeypatch):
    monkeypatch.setenv("TREADLE_RECORDER_TOKEN", "recorder-token-0123456789")
    key = {"Authorization": "Bearer recorder-token-0123456789"}

    async def statuses(host):
        async with serving(Recorder(Sessions()).app, host, 0) as url, httpx.AsyncClient(base_url=url) as http:
            foreign = ({"Host": "0.0.0.0"}, {"Referer": "http://evil.example/"}, {"Origin": "null"})
            refused = [(await http.get("/sessions", headers=key | headers)).status_code for headers in foreign]
            return url.rpartition(":")[0], (await http.get("/sessions", headers=key)).status_code, refused

    for host in ("127.0.0.1", "0.0.0.0"):
        assert asyncio.run(statuses(host)) == ("http://127.0.0.1", 200, [403, 403, 403])
