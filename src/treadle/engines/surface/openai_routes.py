"""POST /v1/completions and /v1/chat/completions, and GET /v1/models: what OpenAI's client speaks."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from treadle.engines.surface.ask import MAX_PROMPTS, Ask, request_of
from treadle.engines.surface.http import NotHere, decode, error_body, nobody_reads, route, status_of
from treadle.engines.surface.openai_reply import ChatReply, CompletionReply, Reply
from treadle.engines.surface.served import Served
from treadle.engines.surface.side_by_side import generate_all, merged
from treadle.errors import RequestError, TreadleError
from treadle.net.bodies import json_answer, unless_gone
from treadle.wire.openai import ChatRequest, CompletionRequest, ModelCard, ModelList, Sampling


def openai_routes(served: Served) -> list[Route]:
    async def completions(http: HttpRequest) -> Response:
        body = await decode(http, CompletionRequest)
        if body.echo or body.suffix or body.best_of not in (None, body.n or 1):
            raise RequestError("echo, suffix and best_of are not offered", fix="leave them out")
        ask = _ask(served, body, max_tokens=16 if body.max_tokens is None else body.max_tokens, logprobs=body.logprobs)
        prompts = _prompts(served, body.prompt)
        requests = [request_of(ids, ask, served.engine.facts) for ids in prompts]
        return await _serve(http, CompletionReply(served, body, requests), is_streamed=bool(body.stream))

    async def chat(http: HttpRequest) -> Response:
        body = await decode(http, ChatRequest)
        if (body.response_format or {"type": "text"}).get("type") != "text":
            raise RequestError("response_format other than text is not offered", fix="leave it out")
        if body.tool_choice not in (None, "auto", "none"):
            raise RequestError("a tool cannot be forced", fix='leave tool_choice out, or set it to "auto" or "none"')
        prompt_ids = await served.encode_chat(
            [_plain(message) for message in body.messages],
            tools=None if body.tool_choice == "none" else body.tools,
            add_generation_prompt=body.add_generation_prompt,
            options=body.chat_template_kwargs,
        )
        asked = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        room = max(1, served.engine.facts.max_model_len - len(prompt_ids))
        ask = _ask(
            served,
            body,
            max_tokens=room if asked is None else asked,
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        )
        request = request_of(prompt_ids, ask, served.engine.facts)
        return await _serve(http, ChatReply(served, body, request), is_streamed=bool(body.stream))

    async def models(_: HttpRequest) -> Response:
        facts, ledger = served.engine.facts, served.ledger
        base = ModelCard(
            id=served.model_name,
            created=int(ledger.started),
            root=str(facts.folder),
            parent=None,
            max_model_len=facts.max_model_len,
        )
        adapters = [
            msgspec.structs.replace(base, id=adapter.name, root=str(adapter.path), parent=base.id)
            for adapter in served.engine.adapters()
        ]
        return json_answer(ModelList(data=[base, *adapters]))

    return [
        route("/v1/completions", completions, served.ledger, method="POST"),
        route("/v1/chat/completions", chat, served.ledger, method="POST"),
        route("/v1/models", models, served.ledger),
    ]


async def _serve(http: HttpRequest, reply: Reply, *, is_streamed: bool) -> Response:
    if is_streamed:
        return StreamingResponse(_events(reply), media_type="text/event-stream")
    generations = await unless_gone(http, generate_all(reply.served.engine, reply.requests))
    return nobody_reads() if generations is None else json_answer(reply.whole(generations))


async def _events(reply: Reply) -> AsyncIterator[bytes]:
    for answer in reply.opening():
        yield _event(answer)
    num_tokens = 0
    num_chars: dict[tuple[int, int], int] = {}
    try:
        streams = [reply.served.engine.stream(request) for request in reply.requests]
        async for place, delta in merged(streams):
            sent = num_chars.get((place, delta.index), 0)
            num_chars[place, delta.index] = sent + len(delta.text)
            num_tokens += len(delta.token_ids)
            yield _event(reply.chunk(place, delta, sent))
    except TreadleError as error:
        yield _event(error_body(str(error), status_of(error)))  # too late for a status
    else:
        for answer in reply.closing(num_tokens):
            yield _event(answer)
    yield b"data: [DONE]\n\n"


def _event(value: object) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def _ask(served: Served, body: Sampling, *, max_tokens: int, logprobs: int | None) -> Ask:
    if body.frequency_penalty or body.presence_penalty or body.logit_bias:
        raise RequestError("penalties and logit_bias are not offered", fix="leave them out")
    return Ask(
        n=1 if body.n is None else body.n,
        max_tokens=max_tokens,
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        top_k=body.top_k,
        min_p=body.min_p,
        seed=body.seed,
        stop=body.stop,
        stop_token_ids=body.stop_token_ids,
        ignore_eos=body.ignore_eos,
        logprobs=logprobs,
        adapter=_adapter(served, body.model),
    )


def _adapter(served: Served, model: str | None) -> str | None:
    """The adapter that `model` names; None for the model itself."""
    folder = served.engine.facts.folder
    if model is None or model in (served.model_name, str(folder), folder.name):
        return None
    if any(adapter.name == model for adapter in served.engine.adapters()):
        return model
    raise NotHere(f"there is no model '{model}' here", fix="GET /v1/models lists what there is")


def _prompts(served: Served, prompt: str | list[Any]) -> list[list[int]]:
    """Token ids of each prompt: one text, several, one list of ids, or several."""
    encode: Callable[[str], list[int]] = served.encode
    if isinstance(prompt, str):
        return [encode(prompt)]
    if prompt and all(type(part) is int for part in prompt):
        return [prompt]
    if not prompt or len(prompt) > MAX_PROMPTS:
        raise RequestError(f"prompt must hold 1 to {MAX_PROMPTS} prompts, and each of them something")
    if not all(isinstance(part, str | list) for part in prompt):
        raise RequestError("prompt must be text, a list of texts, token ids, or a list of lists of token ids")
    return [encode(part) if isinstance(part, str) else part for part in prompt]


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message whose content is one text; parts that are no text are refused."""
    content = message.get("content")
    if "role" not in message:
        raise RequestError("every message needs a role")
    if isinstance(content, list):
        if not all(isinstance(part, dict) and part.get("type") == "text" for part in content):
            raise RequestError("a message may have parts of type text only", fix="leave images and audio out")
        content = "".join(str(part.get("text", "")) for part in content)
    if content is not None and not isinstance(content, str):
        raise RequestError("the content of a message must be text")
    return {**message, "content": content or ""}
