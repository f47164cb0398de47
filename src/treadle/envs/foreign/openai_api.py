"""Parse requests of agents in OpenAI's format, and format replies, streams and errors. Pure, except for fresh ids."""

from __future__ import annotations

import contextlib
import json
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

import msgspec

from treadle.envs.base import Message
from treadle.envs.chat_format import ChatTokenizer, ToolCall, find_tool_calls, without_tool_calls
from treadle.errors import RequestError, TreadleError
from treadle.wire.generate import (
    MAX_NAME_CHARS,
    MAX_STOP_CHARS,
    MAX_STOP_STRINGS,
    ChatRequest,
    CompletionRequest,
    Sampling,
)

T = TypeVar("T")
MessageKey = tuple[str, str, str, tuple[tuple[str, str], ...]]  # role, name, text, (function, arguments) of each call
MAX_BRANCHES = 64
MAX_MESSAGES = 2**14
MIN_TEMPERATURE, MAX_TEMPERATURE = 0.05, 2.0  # near 0, one token has all the probability, and training divides by it
Json = dict[str, Any]


def normalize_message(message: Mapping[str, Any]) -> Message:
    """Convert a message for chat templates: one text as content, and the arguments of calls as objects.

    Other fields are dropped: clients send replies back with all fields of the type ("refusal": null).
    """
    role = message.get("role")
    if not isinstance(role, str):
        raise RequestError("every message needs a role")
    found: Message = {
        "role": check_name_length(role, "the role of a message"),
        "content": _text(message.get("content")),
    }
    for name in ("name", "tool_call_id"):
        if message.get(name):
            text = _as(str, message[name], f"the {name} of a message must be text")
            found[name] = check_name_length(text, f"the {name} of a message")
    if message.get("tool_calls"):
        calls = _as(list, message["tool_calls"], "the tool_calls of a message must be a list")
        found["tool_calls"] = list(map(_normalize_call, calls))
    return found


def message_key(message: Message) -> MessageKey:
    """The identity of a normalized message.

    An agent may strip the white space around a reply, reformat the arguments of a call, or drop its id: the sampled
    tokens are kept anyway.
    """
    calls = tuple(
        (str(call["function"]["name"]), json.dumps(call["function"]["arguments"], sort_keys=True))
        for call in message.get("tool_calls", ())
    )
    text = str(message["content"])
    return (
        message["role"],
        str(message.get("name", "")),
        text.strip() if message["role"] == "assistant" else text,
        calls,
    )


def check_name_length(text: str, what: str) -> str:
    if len(text) > MAX_NAME_CHARS:
        raise RequestError(f"{what} has more than {MAX_NAME_CHARS} characters")
    return text


def _as(kind: type[T], value: object, otherwise: str) -> T:
    if not isinstance(value, kind):
        raise RequestError(otherwise)
    return value


def _text(content: object) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        return "".join(str(part.get("text", "")) for part in content)
    raise RequestError("the content of a message must be text, or parts of type text", fix="leave images and audio out")


def _normalize_call(call: object) -> dict[str, Any]:
    """Arguments are text in requests, and an object in templates; text that is not JSON stays text."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RequestError("a tool call needs a function with a name")
    name = check_name_length(function["name"], "the name of a function")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        with contextlib.suppress(json.JSONDecodeError):
            arguments = json.loads(arguments)
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


@dataclass(frozen=True)
class ParsedReply:
    """A reply: the sampled text, and its parts."""

    text: str
    content: str | None  # the text before the calls, if any
    calls: tuple[Mapping[str, Any], ...] = ()  # in OpenAI's format

    @property
    def message(self) -> Message:
        message: Message = {"role": "assistant", "content": self.content}
        return message | {"tool_calls": list(self.calls)} if self.calls else message


def parse_reply(text: str, *, has_tools: bool) -> ParsedReply:
    """Find tool calls if the agent offered tools. If one of them is broken, the whole reply is text."""
    found = find_tool_calls(text) if has_tools else []
    calls = [call for call in found if isinstance(call, ToolCall)]
    if not calls or len(calls) < len(found):
        return ParsedReply(text, text)
    openai_calls = tuple(
        {
            "id": f"call_{secrets.token_hex(12)}",
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
        }
        for call in calls
    )
    return ParsedReply(text, without_tool_calls(text).strip() or None, openai_calls)


class NoRoom(RequestError):
    """The sequence has reached its maximum length."""


@dataclass(frozen=True)
class Turn:
    """A reply as the agent sees it, and its tokens."""

    reply: ParsedReply
    finish_reason: str
    token_ids: list[int]
    logprobs: list[float]
    prompt_token_ids: list[int]


class AgentChat(ChatRequest, kw_only=True, forbid_unknown_fields=True):
    """POST .../v1/chat/completions. Without a temperature, the run's is used."""

    temperature: float | None = None
    # Accepted, without effect on sampling.
    parallel_tool_calls: bool | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None


class AgentCompletion(CompletionRequest, kw_only=True, forbid_unknown_fields=True):
    """POST .../v1/completions."""

    temperature: float | None = None
    max_tokens: int | None = None


@dataclass(frozen=True)
class AgentRequest:
    """One call of an agent: `n` continuations of these messages, or of this text (or these token ids)."""

    messages: tuple[Message, ...] = ()
    prompt: str | tuple[int, ...] = ()
    tools: tuple[dict[str, Any], ...] = ()
    n: int = 1
    max_tokens: int | None = None
    temperature: float | None = None  # None: the run's
    stop: tuple[str, ...] = ()
    client_id: str = ""  # of the caller, if several share a session

    @cached_property
    def keys(self) -> list[MessageKey]:
        """Keys of the messages. Cached: every conversation of the session is compared with them."""
        return [message_key(message) for message in self.messages]

    @cached_property
    def tools_key(self) -> str:
        return json.dumps(self.tools, sort_keys=True)

    @cached_property
    def num_chars(self) -> int:
        """Size of the part of this call that a session stores."""
        messages = sum(
            len(role) + len(name) + len(text) + sum(len(function) + len(arguments) for function, arguments in calls)
            for role, name, text, calls in self.keys
        )
        return len(self.prompt) + messages + (len(self.tools_key) if self.tools else 0)


def parse_chat_request(body: AgentChat, run_temperature: float, client_id: str = "") -> AgentRequest:
    if not body.messages:
        raise RequestError("there are no messages", fix="send at least one")
    if len(body.messages) > MAX_MESSAGES:
        raise RequestError(f"a conversation has at most {MAX_MESSAGES} messages, not {len(body.messages)}")
    if (body.response_format or {"type": "text"}).get("type") != "text":
        raise RequestError("response_format other than text is not offered", fix="leave it out")
    if body.tool_choice not in (None, "auto", "none"):
        raise RequestError("a tool cannot be forced", fix='leave tool_choice out, or set it to "auto" or "none"')
    if body.top_logprobs:
        raise RequestError("top_logprobs are not offered: only the sampled tokens' own", fix="leave it out")
    if body.chat_template_kwargs or not body.add_generation_prompt:
        raise RequestError("the chat template is used as it is", fix="leave its settings out")
    messages = tuple(normalize_message(message) for message in body.messages)
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    return replace(
        _without_prompt(body, max_tokens, run_temperature, client_id),
        messages=messages,
        tools=() if body.tool_choice == "none" else tuple(body.tools or ()),
    )


def parse_completion_request(body: AgentCompletion, run_temperature: float, client_id: str = "") -> AgentRequest:
    if body.echo or body.suffix or body.best_of not in (None, body.n or 1):
        raise RequestError("echo, suffix and best_of are not offered", fix="leave them out")
    prompt = body.prompt
    if not isinstance(prompt, str) and not all(type(part) is int for part in prompt):
        raise RequestError("prompt must be one text, or the token ids of one", fix="send one call for each prompt")
    if not prompt:
        raise RequestError("the prompt is empty", fix="send at least one token")
    return replace(
        _without_prompt(body, body.max_tokens, run_temperature, client_id),
        prompt=prompt if isinstance(prompt, str) else tuple(prompt),
    )


def _without_prompt(body: Sampling, max_tokens: int | None, run_temperature: float, client_id: str) -> AgentRequest:
    """The sampling parameters; refuses those that change the distribution in ways that training cannot follow."""
    truncates = body.top_p not in (None, 1.0) or body.top_k > 0 or body.min_p > 0
    if truncates or body.frequency_penalty or body.presence_penalty or body.logit_bias:
        raise RequestError(
            "top_p, top_k, min_p, penalties and logit_bias would sample from another distribution than the one trained",
            fix="leave them out; temperature is offered",
        )
    if body.stop_token_ids or body.ignore_eos:
        raise RequestError("stop_token_ids and ignore_eos are not offered", fix="use stop")
    n = 1 if body.n is None else body.n
    if not 1 <= n <= MAX_BRANCHES:
        raise RequestError(f"n must be 1 to {MAX_BRANCHES}")
    if max_tokens is not None and max_tokens < 1:
        raise RequestError("max_tokens must be at least 1")
    stop: Sequence[str] = (body.stop,) if isinstance(body.stop, str) else body.stop or ()
    if len(stop) > MAX_STOP_STRINGS or not all(0 < len(word) <= MAX_STOP_CHARS for word in stop):
        raise RequestError(f"stop takes at most {MAX_STOP_STRINGS} strings, each of 1 to {MAX_STOP_CHARS} characters")
    return AgentRequest(
        n=n,
        max_tokens=max_tokens,
        temperature=_temperature(body, run_temperature),
        stop=tuple(stop),
        client_id=check_name_length(client_id, "X-Session-ID"),
    )


def _temperature(body: Sampling, of_the_run: float) -> float | None:
    """The requested temperature, or None if it is the run's."""
    wanted = body.temperature
    if wanted is None or wanted == of_the_run:
        return None
    if not MIN_TEMPERATURE <= wanted <= MAX_TEMPERATURE:
        raise RequestError(
            f"temperature must be {MIN_TEMPERATURE:g} to {MAX_TEMPERATURE:g}, not {wanted:g}: "
            "near 0 the model always says the same, and there is nothing to learn from it",
            fix=f"leave it out, and the run's own ({of_the_run:g}, --env.temperature) is used",
        )
    return wanted


@dataclass(frozen=True)
class ResponseOptions:
    """What a response must contain."""

    model: str
    is_chat: bool
    logprobs: bool = False
    token_ids: bool = False
    usage_in_stream: bool = False
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))


def response_body(turns: Sequence[Turn], options: ResponseOptions, tokenizer: ChatTokenizer) -> Json:
    choices = [_choice(index, turn, options, tokenizer) for index, turn in enumerate(turns)]
    kind = "chat.completion" if options.is_chat else "text_completion"
    answer = _response(kind, choices, options) | {"usage": _usage(turns)}
    return answer | ({"prompt_token_ids": turns[0].prompt_token_ids} if options.token_ids else {})


def response_events(turns: Sequence[Turn], options: ResponseOptions, tokenizer: ChatTokenizer) -> Iterator[bytes]:
    """The response as server-sent events. Turns are sampled as a whole, so each choice is one event."""
    kind = "chat.completion.chunk" if options.is_chat else "text_completion"
    for index, turn in enumerate(turns):
        choice = _choice(index, turn, options, tokenizer)
        if options.is_chat:
            message = choice.pop("message")
            if "tool_calls" in message:
                calls = [{"index": place, **call} for place, call in enumerate(message["tool_calls"])]
                message = message | {"tool_calls": calls}
            finish_reason = choice["finish_reason"]
            yield _event(_response(kind, [choice | {"delta": message, "finish_reason": None}], options))
            choice = {"index": index, "delta": {}, "finish_reason": finish_reason}
        yield _event(_response(kind, [choice], options))
    if options.usage_in_stream:
        yield _event(_response(kind, [], options) | {"usage": _usage(turns)})
    yield b"data: [DONE]\n\n"


def error_body(error: TreadleError, status: int) -> Json:
    kind = "invalid_request_error" if status < 500 else "server_error"
    code = "context_length_exceeded" if isinstance(error, NoRoom) else status
    return {"error": {"message": str(error), "type": kind, "param": None, "code": code}}


def _response(kind: str, choices: list[Json], options: ResponseOptions) -> Json:
    prefix = "chatcmpl" if options.is_chat else "cmpl"
    return {
        "id": f"{prefix}-{options.id}",
        "object": kind,
        "created": options.created,
        "model": options.model,
        "choices": choices,
    }


def _choice(index: int, turn: Turn, options: ResponseOptions, tokenizer: ChatTokenizer) -> Json:
    ends_with_calls = bool(turn.reply.calls) and turn.finish_reason == "stop"
    choice: Json = {"index": index, "finish_reason": "tool_calls" if ends_with_calls else turn.finish_reason}
    choice |= {"message": turn.reply.message} if options.is_chat else {"text": turn.reply.text}
    choice["logprobs"] = _logprobs(turn, options, tokenizer) if options.logprobs else None
    return choice | ({"token_ids": turn.token_ids} if options.token_ids else {})


def _logprobs(turn: Turn, options: ResponseOptions, tokenizer: ChatTokenizer) -> Json:
    tokens = [tokenizer.decode([token]) for token in turn.token_ids]
    if not options.is_chat:
        return {"tokens": tokens, "token_logprobs": turn.logprobs, "top_logprobs": None, "text_offset": []}
    content = [
        {"token": token, "logprob": logprob, "bytes": list(token.encode()), "top_logprobs": []}
        for token, logprob in zip(tokens, turn.logprobs, strict=True)
    ]
    return {"content": content, "refusal": None}


def _usage(turns: Sequence[Turn]) -> Json:
    num_prompt, num_sampled = len(turns[0].prompt_token_ids), sum(len(turn.token_ids) for turn in turns)
    return {"prompt_tokens": num_prompt, "completion_tokens": num_sampled, "total_tokens": num_prompt + num_sampled}


def _event(value: Json) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"
