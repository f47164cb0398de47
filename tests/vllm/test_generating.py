"""The route of ours in vLLM's API process, with vLLM's own classes around it and an engine client that does as told."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace

import msgspec
import pytest

from treadle.engines.vllm.completions import VllmOutput, VllmRequest, decode_output

SOON_S = 10.0


class Client:
    """In the place of vLLM's engine client. `moments`: what it gives, raises, or waits for."""

    def __init__(self, *moments):
        self._moments = moments
        self.asked = []
        self.has_begun = asyncio.Event()
        self.was_dropped = False

    async def generate(self, prompt, params, request_id, *, lora_request=None, priority=0):
        self.asked.append(SimpleNamespace(prompt=prompt, params=params, id=request_id, adapter=lora_request))
        try:
            self.has_begun.set()
            for moment in self._moments:
                if isinstance(moment, Exception):
                    raise moment
                if moment is None:
                    await asyncio.sleep(60)
                else:
                    yield moment
        except (asyncio.CancelledError, GeneratorExit):
            self.was_dropped = True
            raise


class Asker:
    """Whoever speaks HTTP with vLLM's API process; may leave."""

    def __init__(self):
        self._left = asyncio.Event()
        self._has_asked = False
        self.status, self.body = None, b""

    def leave(self):
        self._left.set()

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
            if not self._has_asked:
                self._has_asked = True
                return {"type": "http.request", "body": msgspec.json.encode(order), "more_body": False}
            await self._left.wait()
            return {"type": "http.disconnect"}

        async def send(message):
            self.status = message.get("status", self.status)
            self.body += message.get("body", b"")

        async with asyncio.timeout(SOON_S):
            await TreadleRoutes(None)(scope, receive, send)
        return self


@pytest.fixture(autouse=True)
def _key(monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "key")


def moment(*entries, text="", finish_reason=None):
    """vLLM's own, of one completion; of each new token its entries, the sampled one first."""
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


def test_a_whole_answer_is_numbers():
    async def ask():
        client = Client(moment(A, B, finish_reason="length"))
        asker = await Asker().ask(client, sampling={"detokenize": False})
        (choice,) = decode_output(asker.body).choices
        assert (choice.token_ids, choice.logprobs, choice.tops) == ([7, 9], [-0.5, -1.0], [{7: -0.5}, {9: -1.0}])
        assert (choice.text, choice.finish_reason) == (None, "length")
        assert not client.was_dropped
        assert client.asked[0].prompt["cache_salt"] == "v0"
        assert client.asked[0].params.flat_logprobs
        assert client.asked[0].adapter is None

    asyncio.run(ask())


def test_moments_that_vllm_put_together_keep_all_their_tops():
    both = moment(A, text="a")
    both.add(moment(B, text="b", finish_reason="length"), aggregate=True)

    async def ask():
        asker = await Asker().ask(Client(both), stream=True)
        (answer,) = [decode_output(line) for line in asker.body.splitlines()]
        assert answer.choices[0].tops == [{7: -0.5}, {9: -1.0}]

    asyncio.run(ask())


def test_a_stream_is_lines_and_an_error_in_its_midst_is_the_last_one(caplog):
    async def ask():
        asker = await Asker().ask(Client(moment(A, text="a"), RuntimeError("lost")), stream=True)
        first, last = asker.body.splitlines()
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
def test_what_fails_before_the_first_token_has_a_status_and_its_own_words(stream, error, status, words):
    async def ask():
        asker = await Asker().ask(Client(error() if callable(error) else error), stream=stream)
        assert asker.status == status
        assert json.loads(asker.body)["error"]["message"] == words

    asyncio.run(ask())


def test_what_vllm_itself_refuses_is_the_requests_fault():
    async def ask():
        asker = await Asker().ask(Client(), sampling={"top_p": 7.0})
        assert asker.status == 400
        assert "top_p" in asker.body.decode()

    asyncio.run(ask())


def test_an_adapter_is_asked_for_by_name_and_one_that_is_not_there_refused():
    async def ask():
        client = Client(moment(A, finish_reason="length"))
        await Asker().ask(client, model="a@1")
        assert client.asked[0].adapter == "the adapter"
        asker = await Asker().ask(client, model="a@2")
        assert asker.status == 400
        assert "a@2" in asker.body.decode()

    asyncio.run(ask())


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_before_the_first_token_takes_its_request_with_it(stream):
    async def leave():
        client, asker = Client(None), Asker()
        asking = asyncio.ensure_future(asker.ask(client, stream=stream))
        await asyncio.wait_for(client.has_begun.wait(), SOON_S)
        asker.leave()
        await asking
        assert client.was_dropped

    asyncio.run(leave())


def test_a_client_that_leaves_a_stream_takes_its_request_with_it():
    async def leave():
        client, asker = Client(moment(A, text="a"), None), Asker()
        asking = asyncio.ensure_future(asker.ask(client, stream=True))
        while not asker.body:
            await asyncio.sleep(0.01)
        asker.leave()
        await asking
        assert client.was_dropped

    asyncio.run(leave())
