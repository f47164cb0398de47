"""POST /treadle/generate in vLLM's API process, with vLLM's own classes and a scripted engine client."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace

import msgspec
import pytest

from treadle.engines.vllm.command import KEY_VARIABLE
from treadle.engines.vllm.completions import VllmOutput, VllmRequest, decode_output

SOON_S = 10.0


class ScriptedClient:
    """Replaces vLLM's engine client. `steps`: outputs to yield, exceptions to raise, None to wait."""

    def __init__(self, *steps):
        self._steps = steps
        self.asked = []
        self.has_begun = asyncio.Event()
        self.was_aborted = False

    async def generate(self, prompt, params, request_id, *, lora_request=None, priority=0):
        self.asked.append(SimpleNamespace(prompt=prompt, params=params, id=request_id, adapter=lora_request))
        try:
            self.has_begun.set()
            for step in self._steps:
                if isinstance(step, Exception):
                    raise step
                if step is None:
                    await asyncio.sleep(60)
                else:
                    yield step
        except (asyncio.CancelledError, GeneratorExit):
            self.was_aborted = True
            raise


class HttpCaller:
    """Sends one request to the middleware; may disconnect."""

    def __init__(self):
        self._disconnected = asyncio.Event()
        self._has_sent = False
        self.status, self.body = None, b""

    def disconnect(self):
        self._disconnected.set()

    async def ask(self, client, *, stream=False, model="policy", sampling=None):
        from treadle.engines.vllm.middleware import TreadleRoutes

        order = VllmRequest(model, [5, 6], {"max_tokens": 4, "logprobs": 1, **(sampling or {})}, "v0", stream=stream)
        models = SimpleNamespace(lora_requests={"a@1": "the adapter"})
        state = SimpleNamespace(engine_client=client, openai_serving_models=models)
        scope = {
            "type": "http", "method": "POST", "path": "/treadle/generate", "app": SimpleNamespace(state=state),
            "headers": [(b"authorization", b"Bearer key")], "asgi": {"spec_version": "2.3"},
        }  # fmt: skip

        async def receive():
            if not self._has_sent:
                self._has_sent = True
                return {"type": "http.request", "body": msgspec.json.encode(order), "more_body": False}
            await self._disconnected.wait()
            return {"type": "http.disconnect"}

        async def send(message):
            self.status = message.get("status", self.status)
            self.body += message.get("body", b"")

        async with asyncio.timeout(SOON_S):
            await TreadleRoutes(None)(scope, receive, send)
        return self


@pytest.fixture(autouse=True)
def _key(monkeypatch):
    monkeypatch.setenv(KEY_VARIABLE, "key")


def output(*entries, text="", finish_reason=None):
    """vLLM's RequestOutput of one completion. `entries`: per new token, (token, logprob) of it and the top ones."""
    from vllm.logprobs import FlatLogprobs
    from vllm.outputs import CompletionOutput, RequestOutput

    flat = FlatLogprobs()
    for one in entries:
        flat.append_fast([t for t, _ in one], [lp for _, lp in one], range(len(one)), [None] * len(one))
    completion = CompletionOutput(
        index=0, text=text, token_ids=[one[0][0] for one in entries], cumulative_logprob=None, logprobs=flat,
        finish_reason=finish_reason,
    )  # fmt: skip
    return RequestOutput(
        request_id="1", prompt=None, prompt_token_ids=[5, 6], prompt_logprobs=None, outputs=[completion],
        finished=finish_reason is not None,
    )  # fmt: skip


A, B = [(7, -0.5), (7, -0.5)], [(9, -1.0), (9, -1.0)]


def test_a_full_response_contains_ids_and_logprobs():
    async def ask():
        client = ScriptedClient(output(A, B, finish_reason="length"))
        caller = await HttpCaller().ask(client, sampling={"detokenize": False})
        (choice,) = decode_output(caller.body).choices
        assert (choice.token_ids, choice.logprobs, choice.tops) == ([7, 9], [-0.5, -1.0], [{7: -0.5}, {9: -1.0}])
        assert (choice.text, choice.finish_reason) == (None, "length")
        assert not client.was_aborted
        assert client.asked[0].prompt["cache_salt"] == "v0"
        assert client.asked[0].params.flat_logprobs
        assert client.asked[0].adapter is None

    asyncio.run(ask())


def test_outputs_that_vllm_merged_keep_all_their_top_tokens():
    both = output(A, text="a")
    both.add(output(B, text="b", finish_reason="length"), aggregate=True)

    async def ask():
        caller = await HttpCaller().ask(ScriptedClient(both), stream=True)
        (answer,) = [decode_output(line) for line in caller.body.splitlines()]
        assert answer.choices[0].tops == [{7: -0.5}, {9: -1.0}]

    asyncio.run(ask())


def test_a_stream_is_json_lines_and_an_error_is_its_last_line(caplog):
    async def ask():
        caller = await HttpCaller().ask(ScriptedClient(output(A, text="a"), RuntimeError("lost")), stream=True)
        first, last = caller.body.splitlines()
        assert decode_output(first) == VllmOutput(decode_output(first).choices)
        assert json.loads(last) == {"error": "RuntimeError: lost"}

    asyncio.run(ask())


def _unexpected():
    from vllm.v1.engine.exceptions import EngineGenerateError

    error = EngineGenerateError()
    error.__cause__ = TypeError("what it was")
    return error


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "words"),
    [(ValueError("too long"), 400, "too long"), (_unexpected, 500, "TypeError: what it was")],
)
def test_an_error_before_the_first_token_has_a_status_and_message(stream, error, status, words):
    async def ask():
        caller = await HttpCaller().ask(ScriptedClient(error() if callable(error) else error), stream=stream)
        assert caller.status == status
        assert json.loads(caller.body)["error"]["message"] == words

    asyncio.run(ask())


def test_sampling_parameters_that_vllm_rejects_are_a_400():
    async def ask():
        caller = await HttpCaller().ask(ScriptedClient(), sampling={"top_p": 7.0})
        assert caller.status == 400
        assert "top_p" in caller.body.decode()

    asyncio.run(ask())


def test_an_adapter_is_selected_by_name_and_an_unknown_one_refused():
    async def ask():
        client = ScriptedClient(output(A, finish_reason="length"))
        await HttpCaller().ask(client, model="a@1")
        assert client.asked[0].adapter == "the adapter"
        caller = await HttpCaller().ask(client, model="a@2")
        assert caller.status == 400
        assert "a@2" in caller.body.decode()

    asyncio.run(ask())


@pytest.mark.parametrize("stream", [False, True])
def test_a_disconnect_before_the_first_token_aborts_the_request(stream):
    async def disconnect():
        client, caller = ScriptedClient(None), HttpCaller()
        asking = asyncio.ensure_future(caller.ask(client, stream=stream))
        await asyncio.wait_for(client.has_begun.wait(), SOON_S)
        caller.disconnect()
        await asking
        assert client.was_aborted

    asyncio.run(disconnect())


def test_a_disconnect_during_a_stream_aborts_the_request():
    async def disconnect():
        client, caller = ScriptedClient(output(A, text="a"), None), HttpCaller()
        asking = asyncio.ensure_future(caller.ask(client, stream=True))
        while not caller.body:
            await asyncio.sleep(0.01)
        caller.disconnect()
        await asking
        assert client.was_aborted

    asyncio.run(disconnect())
