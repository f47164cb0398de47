"""OpenAI API: POST /v1/completions, POST /v1/chat/completions and GET /v1/models."""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, Literal

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from treadle.engines.api.context import (
    CLIENT_LEFT,
    ApiContext,
    decode,
    error_body,
    http_status,
    route,
)
from treadle.engines.api.generate import (
    MAX_PROMPTS,
    GenerationOptions,
    build_request,
    generate_all,
    merge_streams,
    oldest_version,
)
from treadle.engines.interface import CompletionDelta, GenerationResult, Request, SampledCompletion
from treadle.engines.tokenizer import ModelTokenizer
from treadle.errors import RequestError, TreadleError
from treadle.net.server import json_answer, unless_gone
from treadle.wire.generate import (
    Answer,
    ChatLogprob,
    ChatLogprobs,
    ChatRequest,
    Choice,
    CompletionLogprobs,
    CompletionRequest,
    ModelCard,
    ModelList,
    PromptLogprob,
    Sampling,
    TokenLogprob,
    Usage,
)

Kind = Literal["text_completion", "chat.completion", "chat.completion.chunk"]


def _entry(token: int, logprob: float, tokenizer: ModelTokenizer) -> TokenLogprob:
    shown = tokenizer.token(token)
    return TokenLogprob(token=shown, logprob=logprob, bytes=list(shown.encode()))


def _prompt_entry(top: Mapping[int, float]) -> dict[str, PromptLogprob]:
    return {str(token): PromptLogprob(logprob=logprob) for token, logprob in top.items()}


class OpenAIReply(ABC):
    """Formats the response to one request: `full`, or as a stream of `first_chunks`, `chunk`s and `last_chunks`."""

    prefix: str  # of the response id
    kind: Kind
    chunk_kind: Kind

    def __init__(self, context: ApiContext, body: CompletionRequest | ChatRequest, requests: list[Request]) -> None:
        self.context = context
        self.requests = requests
        self._id = f"{self.prefix}-{secrets.token_hex(12)}"
        self._created = int(time.time())
        self._model = body.model or context.model_name
        self._wants_ids = body.return_token_ids
        self._wants_logprobs = body.logprobs is not None and body.logprobs is not False  # 0 in a completion: wanted
        self._wants_usage = body.stream_options is not None and body.stream_options.include_usage

    def full(self, generations: Sequence[GenerationResult]) -> Answer:
        completions = [sampled for generation in generations for sampled in generation.completions]
        choices = [self._choice(i, sampled, sampled.policy_versions) for i, sampled in enumerate(completions)]
        answer = self._answer(self.kind, choices)
        answer.policy_version = oldest_version(completions)
        answer.usage = self._usage(sum(len(sampled.token_ids) for sampled in completions))
        return answer

    def first_chunks(self) -> list[Answer]:
        return []

    def chunk(self, request_index: int, delta: CompletionDelta, num_chars: int) -> Answer:
        """One delta of a request, after `num_chars` characters of the completion's text."""
        index = request_index * self.requests[0].n + delta.index
        answer = self._answer(self.chunk_kind, [self._choice(index, delta, [delta.policy_version], num_chars)])
        answer.policy_version = delta.policy_version
        return answer

    def last_chunks(self, num_tokens: int) -> list[Answer]:
        """The usage, if the client asked for it."""
        if not self._wants_usage:
            return []
        last = self._answer(self.chunk_kind, [])
        last.usage = self._usage(num_tokens)
        return [last]

    @abstractmethod
    def _set_content(self, choice: Choice, sampled: SampledCompletion | CompletionDelta, num_chars: int) -> None:
        """Set the text, or new text, and the logprobs."""

    def _choice(
        self, index: int, sampled: SampledCompletion | CompletionDelta, policy_versions: list[int], num_chars: int = 0
    ) -> Choice:
        choice = Choice(
            index=index,
            finish_reason=sampled.finish_reason,
            policy_versions=policy_versions,
            token_ids=sampled.token_ids if self._wants_ids else None,
        )
        self._set_content(choice, sampled, num_chars)
        return choice

    def _answer(self, kind: Kind, choices: list[Choice]) -> Answer:
        return Answer(id=self._id, object=kind, created=self._created, model=self._model, choices=choices)

    def _usage(self, num_tokens: int) -> Usage:
        num_prompt = sum(len(request.prompt_ids) for request in self.requests)
        return Usage(prompt_tokens=num_prompt, completion_tokens=num_tokens, total_tokens=num_prompt + num_tokens)


class CompletionReply(OpenAIReply):
    """Response of /v1/completions: several prompts, each with `n` choices."""

    prefix = "cmpl"
    kind = chunk_kind = "text_completion"

    def full(self, generations: Sequence[GenerationResult]) -> Answer:
        answer = super().full(generations)
        for choice in answer.choices:
            tops = generations[choice.index // self.requests[0].n].prompt_tops
            if tops is not None:
                choice.prompt_logprobs = [_prompt_entry(top) if top else None for top in tops]
        return answer

    def _set_content(self, choice: Choice, sampled: SampledCompletion | CompletionDelta, num_chars: int) -> None:
        choice.text = sampled.text
        if self._wants_ids and isinstance(sampled, SampledCompletion):
            choice.prompt_token_ids = self.requests[choice.index // self.requests[0].n].prompt_ids
        if not self._wants_logprobs:
            return
        tokenizer = self.context.engine.tokenizer
        tokens = [tokenizer.token(token) for token in sampled.token_ids]
        tops = [{tokenizer.token(token): logprob for token, logprob in top.items()} for top in sampled.tops]
        choice.logprobs = CompletionLogprobs(
            tokens=tokens,
            token_logprobs=sampled.logprobs,
            top_logprobs=tops or None,
            text_offset=[num_chars, *accumulate((len(token) for token in tokens), initial=num_chars)][1:-1],
        )


class ChatReply(OpenAIReply):
    """Response of /v1/chat/completions: one conversation with `n` choices."""

    prefix = "chatcmpl"
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def first_chunks(self) -> list[Answer]:
        """The role, once per choice."""
        role = {"role": "assistant", "content": ""}
        choices = (
            Choice(index=index, finish_reason=None, policy_versions=[], delta=role)
            for index in range(self.requests[0].n)
        )
        return [self._answer(self.chunk_kind, [choice]) for choice in choices]

    def _set_content(self, choice: Choice, sampled: SampledCompletion | CompletionDelta, num_chars: int) -> None:
        if isinstance(sampled, SampledCompletion):
            choice.message = {"role": "assistant", "content": sampled.text}
        else:
            choice.delta = {"content": sampled.text}
        if not self._wants_logprobs:
            return
        tokenizer = self.context.engine.tokenizer
        content = []
        tops = sampled.tops or [{}] * len(sampled.token_ids)
        for token, logprob, top in zip(sampled.token_ids, sampled.logprobs, tops, strict=True):
            own = _entry(token, logprob, tokenizer)
            others = [_entry(other, value, tokenizer) for other, value in top.items()]
            content.append(ChatLogprob(token=own.token, logprob=own.logprob, bytes=own.bytes, top_logprobs=others))
        choice.logprobs = ChatLogprobs(content=content)

    def _answer(self, kind: Kind, choices: list[Choice]) -> Answer:
        answer = super()._answer(kind, choices)
        if self._wants_ids:
            answer.prompt_token_ids = self.requests[0].prompt_ids
        return answer


def openai_routes(context: ApiContext) -> list[Route]:
    async def completions(http: HttpRequest) -> Response:
        body = await decode(http, CompletionRequest)
        if body.echo or body.suffix or body.best_of not in (None, body.n or 1):
            raise RequestError("echo, suffix and best_of are not offered", fix="leave them out")
        if body.stream and body.prompt_logprobs is not None:
            raise RequestError("a streamed answer has no prompt_logprobs", fix='leave "stream" out')
        options = _options(
            context, body, max_tokens=16 if body.max_tokens is None else body.max_tokens, logprobs=body.logprobs
        )
        options = replace(options, prompt_logprobs=body.prompt_logprobs)
        prompts = _prompts(context, body.prompt)
        requests = [build_request(ids, options, context.engine.facts) for ids in prompts]
        return await _serve(http, CompletionReply(context, body, requests), is_streamed=bool(body.stream))

    async def chat(http: HttpRequest) -> Response:
        body = await decode(http, ChatRequest)
        if (body.response_format or {"type": "text"}).get("type") != "text":
            raise RequestError("response_format other than text is not offered", fix="leave it out")
        if body.tool_choice not in (None, "auto", "none"):
            raise RequestError("a tool cannot be forced", fix='leave tool_choice out, or set it to "auto" or "none"')
        prompt_ids = await context.encode_chat(
            [_plain(message) for message in body.messages],
            tools=None if body.tool_choice == "none" else body.tools,
            add_generation_prompt=body.add_generation_prompt,
            options=body.chat_template_kwargs,
        )
        asked = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        room = max(1, context.engine.facts.max_model_len - len(prompt_ids))
        options = _options(
            context,
            body,
            max_tokens=room if asked is None else asked,
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        )
        request = build_request(prompt_ids, options, context.engine.facts)
        return await _serve(http, ChatReply(context, body, [request]), is_streamed=bool(body.stream))

    async def models(_: HttpRequest) -> Response:
        facts, stats = context.engine.facts, context.stats
        base = ModelCard(
            id=context.model_name,
            created=int(stats.started),
            root=str(facts.folder),
            parent=None,
            max_model_len=facts.max_model_len,
        )
        adapters = [
            msgspec.structs.replace(base, id=adapter.name, root=str(adapter.path), parent=base.id)
            for adapter in context.engine.adapters()
        ]
        return json_answer(ModelList(data=[base, *adapters]))

    return [
        route("/v1/completions", completions, context.stats, method="POST"),
        route("/v1/chat/completions", chat, context.stats, method="POST"),
        route("/v1/models", models, context.stats),
    ]


async def _serve(http: HttpRequest, reply: OpenAIReply, *, is_streamed: bool) -> Response:
    if is_streamed:
        return StreamingResponse(_events(reply), media_type="text/event-stream")
    generations = await unless_gone(http, generate_all(reply.context.engine, reply.requests))
    return Response(status_code=CLIENT_LEFT) if generations is None else json_answer(reply.full(generations))


async def _events(reply: OpenAIReply) -> AsyncIterator[bytes]:
    for answer in reply.first_chunks():
        yield _event(answer)
    num_tokens = 0
    num_chars: dict[tuple[int, int], int] = {}
    try:
        streams = [reply.context.engine.stream(request) for request in reply.requests]
        async for index, delta in merge_streams(streams):
            sent = num_chars.get((index, delta.index), 0)
            num_chars[index, delta.index] = sent + len(delta.text)
            num_tokens += len(delta.token_ids)
            yield _event(reply.chunk(index, delta, sent))
    except TreadleError as error:
        yield _event(error_body(str(error), http_status(error)))  # the HTTP status has been sent already
    else:
        for answer in reply.last_chunks(num_tokens):
            yield _event(answer)
    yield b"data: [DONE]\n\n"


def _event(value: object) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def _options(context: ApiContext, body: Sampling, *, max_tokens: int, logprobs: int | None) -> GenerationOptions:
    if body.frequency_penalty or body.presence_penalty or body.logit_bias:
        raise RequestError("penalties and logit_bias are not offered", fix="leave them out")
    return GenerationOptions(
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
        adapter=context.adapter_named(body.model),
    )


def _prompts(context: ApiContext, prompt: str | list[Any]) -> list[list[int]]:
    """Token ids of each prompt. `prompt` is a text, a list of texts, token ids, or a list of lists of token ids."""
    encode: Callable[[str], list[int]] = context.encode
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
    """The message with its text parts joined; other parts are refused."""
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
