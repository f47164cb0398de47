"""OpenAI API: POST /v1/completions, POST /v1/chat/completions and GET /v1/models."""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any, Literal

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from treadle.engines.api.context import Served
from treadle.engines.api.generate import MAX_PROMPTS, Ask, generate_all, merged, oldest_version, request_of
from treadle.engines.api.http import NotHere, decode, error_body, nobody_reads, route, status_of
from treadle.engines.interface import Delta, Generation, Request, Sampled
from treadle.engines.tokenizer import Text
from treadle.errors import RequestError, TreadleError
from treadle.net.bodies import json_answer, unless_gone
from treadle.wire.openai import (
    Answer,
    ChatLogprob,
    ChatLogprobs,
    ChatRequest,
    Choice,
    CompletionLogprobs,
    CompletionRequest,
    ModelCard,
    ModelList,
    Sampling,
    TokenLogprob,
    Usage,
)

Kind = Literal["text_completion", "chat.completion", "chat.completion.chunk"]


def chat_logprobs(sampled: Sampled | Delta, text: Text) -> ChatLogprobs:
    tops = sampled.tops or [{}] * len(sampled.token_ids)
    content = []
    for token, logprob, top in zip(sampled.token_ids, sampled.logprobs, tops, strict=True):
        own = _entry(token, logprob, text)
        others = [_entry(other, value, text) for other, value in top.items()]
        content.append(ChatLogprob(token=own.token, logprob=own.logprob, bytes=own.bytes, top_logprobs=others))
    return ChatLogprobs(content=content)


def completion_logprobs(sampled: Sampled | Delta, text: Text, num_chars: int) -> CompletionLogprobs:
    """`num_chars` of the text were sent before this part of it."""
    tokens = [text.token(token) for token in sampled.token_ids]
    offsets = [num_chars, *accumulate((len(token) for token in tokens), initial=num_chars)][1:-1]
    tops = None
    if sampled.tops:
        tops = [{text.token(token): logprob for token, logprob in top.items()} for top in sampled.tops]
    return CompletionLogprobs(
        tokens=tokens,
        token_logprobs=sampled.logprobs,
        top_logprobs=tops,
        text_offset=offsets,
    )


def _entry(token: int, logprob: float, text: Text) -> TokenLogprob:
    shown = text.token(token)
    return TokenLogprob(token=shown, logprob=logprob, bytes=list(shown.encode()))


class Reply(ABC):
    """How one call is answered: `whole`, or `opening`, chunks and `closing`."""

    prefix: str  # of the answer's id
    kind: Kind
    chunk_kind: Kind

    def __init__(self, served: Served, body: CompletionRequest | ChatRequest, requests: list[Request]) -> None:
        self.served = served
        self.requests = requests
        self._id = f"{self.prefix}-{secrets.token_hex(12)}"
        self._created = int(time.time())
        self._model = body.model or served.model_name
        self._wants_ids = body.return_token_ids
        self._wants_usage = body.stream_options is not None and body.stream_options.include_usage

    def whole(self, generations: Sequence[Generation]) -> Answer:
        completions = [sampled for generation in generations for sampled in generation.completions]
        answer = self._answer(self.kind, [self._whole_choice(i, sampled) for i, sampled in enumerate(completions)])
        answer.policy_version = oldest_version(completions)
        answer.usage = self._usage(sum(len(sampled.token_ids) for sampled in completions))
        return answer

    def opening(self) -> list[Answer]:
        """What a stream begins with."""
        return []

    def chunk(self, place: int, delta: Delta, num_chars: int) -> Answer:
        """One delta of request `place`; of its completion's text `num_chars` were sent before."""
        index = place * self.requests[0].n + delta.index
        choice = self._choice(index, delta, [delta.policy_version], num_chars)
        self._put_delta(choice, delta.text)
        answer = self._answer(self.chunk_kind, [choice])
        answer.policy_version = delta.policy_version
        return answer

    def closing(self, num_tokens: int) -> list[Answer]:
        """What a stream ends with, when the client wants to know what it cost."""
        if not self._wants_usage:
            return []
        last = self._answer(self.chunk_kind, [])
        last.usage = self._usage(num_tokens)
        return [last]

    @abstractmethod
    def _put_whole(self, choice: Choice, text: str) -> None: ...

    @abstractmethod
    def _put_delta(self, choice: Choice, text: str) -> None: ...

    @abstractmethod
    def _logprobs(self, sampled: Sampled | Delta, num_chars: int) -> ChatLogprobs | CompletionLogprobs | None: ...

    def _whole_choice(self, index: int, sampled: Sampled) -> Choice:
        choice = self._choice(index, sampled, sampled.policy_versions, 0)
        self._put_whole(choice, sampled.text)
        return choice

    def _choice(self, index: int, sampled: Sampled | Delta, policy_versions: list[int], num_chars: int) -> Choice:
        return Choice(
            index=index,
            finish_reason=sampled.finish_reason,
            policy_versions=policy_versions,
            logprobs=self._logprobs(sampled, num_chars),
            token_ids=sampled.token_ids if self._wants_ids else None,
        )

    def _answer(self, kind: Kind, choices: list[Choice]) -> Answer:
        return Answer(id=self._id, object=kind, created=self._created, model=self._model, choices=choices)

    def _usage(self, num_tokens: int) -> Usage:
        num_prompt = sum(len(request.prompt_ids) for request in self.requests)
        return Usage(prompt_tokens=num_prompt, completion_tokens=num_tokens, total_tokens=num_prompt + num_tokens)


class CompletionReply(Reply):
    """Of several prompts, each with `n` choices."""

    prefix = "cmpl"
    kind = chunk_kind = "text_completion"

    def __init__(self, served: Served, body: CompletionRequest, requests: list[Request]) -> None:
        super().__init__(served, body, requests)
        self._wants_logprobs = body.logprobs is not None

    def _put_whole(self, choice: Choice, text: str) -> None:
        choice.text = text
        if self._wants_ids:
            choice.prompt_token_ids = self.requests[choice.index // self.requests[0].n].prompt_ids

    def _put_delta(self, choice: Choice, text: str) -> None:
        choice.text = text

    def _logprobs(self, sampled: Sampled | Delta, num_chars: int) -> CompletionLogprobs | None:
        return completion_logprobs(sampled, self.served.text, num_chars) if self._wants_logprobs else None


class ChatReply(Reply):
    """Of one conversation, with `n` choices."""

    prefix = "chatcmpl"
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def __init__(self, served: Served, body: ChatRequest, request: Request) -> None:
        super().__init__(served, body, [request])
        self._wants_logprobs = bool(body.logprobs)

    def opening(self) -> list[Answer]:
        """Who speaks."""
        begin = {"role": "assistant", "content": ""}
        choices = (
            Choice(index=index, finish_reason=None, policy_versions=[], delta=begin)
            for index in range(self.requests[0].n)
        )
        return [self._answer(self.chunk_kind, [choice]) for choice in choices]

    def _put_whole(self, choice: Choice, text: str) -> None:
        choice.message = {"role": "assistant", "content": text}

    def _put_delta(self, choice: Choice, text: str) -> None:
        choice.delta = {"content": text}

    def _logprobs(self, sampled: Sampled | Delta, num_chars: int) -> ChatLogprobs | None:
        return chat_logprobs(sampled, self.served.text) if self._wants_logprobs else None

    def _answer(self, kind: Kind, choices: list[Choice]) -> Answer:
        answer = super()._answer(kind, choices)
        if self._wants_ids:
            answer.prompt_token_ids = self.requests[0].prompt_ids
        return answer


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
