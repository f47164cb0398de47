"""Replies in OpenAI's shapes, whole or as events of a stream, and errors. Pure."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from treadle.envs.foreign.lines import NoRoom, Turn
from treadle.envs.tokens import ChatTokenizer
from treadle.errors import TreadleError

Json = dict[str, Any]


@dataclass(frozen=True)
class Wishes:
    """What of an answer the caller wants to see."""

    model: str
    is_chat: bool
    logprobs: bool = False
    token_ids: bool = False
    usage_in_stream: bool = False
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))


def whole(turns: Sequence[Turn], wishes: Wishes, tokenizer: ChatTokenizer) -> Json:
    choices = [_whole_choice(index, turn, wishes, tokenizer) for index, turn in enumerate(turns)]
    kind = "chat.completion" if wishes.is_chat else "text_completion"
    answer = _answer(kind, choices, wishes) | {"usage": _usage(turns)}
    return answer | ({"prompt_token_ids": turns[0].prompt_token_ids} if wishes.token_ids else {})


def events(turns: Sequence[Turn], wishes: Wishes, tokenizer: ChatTokenizer) -> Iterator[bytes]:
    """The same as server-sent events. A turn is sampled as a whole, so that each choice comes in one piece."""
    kind = "chat.completion.chunk" if wishes.is_chat else "text_completion"
    for index, turn in enumerate(turns):
        choice = _whole_choice(index, turn, wishes, tokenizer)
        if wishes.is_chat:
            message = choice.pop("message")
            if "tool_calls" in message:
                calls = [{"index": place, **call} for place, call in enumerate(message["tool_calls"])]
                message = message | {"tool_calls": calls}
            finish_reason = choice["finish_reason"]
            yield _event(_answer(kind, [choice | {"delta": message, "finish_reason": None}], wishes))
            choice = {"index": index, "delta": {}, "finish_reason": finish_reason}
        yield _event(_answer(kind, [choice], wishes))
    if wishes.usage_in_stream:
        yield _event(_answer(kind, [], wishes) | {"usage": _usage(turns)})
    yield b"data: [DONE]\n\n"


def error_body(error: TreadleError, status: int) -> Json:
    kind = "invalid_request_error" if status < 500 else "server_error"
    code = "context_length_exceeded" if isinstance(error, NoRoom) else status
    return {"error": {"message": str(error), "type": kind, "param": None, "code": code}}


def _answer(kind: str, choices: list[Json], wishes: Wishes) -> Json:
    prefix = "chatcmpl" if wishes.is_chat else "cmpl"
    return {
        "id": f"{prefix}-{wishes.id}",
        "object": kind,
        "created": wishes.created,
        "model": wishes.model,
        "choices": choices,
    }


def _whole_choice(index: int, turn: Turn, wishes: Wishes, tokenizer: ChatTokenizer) -> Json:
    ends_with_calls = bool(turn.spoken.calls) and turn.finish_reason == "stop"
    choice: Json = {"index": index, "finish_reason": "tool_calls" if ends_with_calls else turn.finish_reason}
    choice |= {"message": turn.spoken.message} if wishes.is_chat else {"text": turn.spoken.whole}
    choice["logprobs"] = _logprobs(turn, wishes, tokenizer) if wishes.logprobs else None
    return choice | ({"token_ids": turn.token_ids} if wishes.token_ids else {})


def _logprobs(turn: Turn, wishes: Wishes, tokenizer: ChatTokenizer) -> Json:
    tokens = [tokenizer.decode([token]) for token in turn.token_ids]
    if not wishes.is_chat:
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
