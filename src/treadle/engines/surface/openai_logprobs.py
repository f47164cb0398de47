"""Logprobs in OpenAI's two shapes: tokens as text, not as ids."""

from __future__ import annotations

from itertools import accumulate

from treadle.engines.port import Delta, Sampled
from treadle.engines.text import Text
from treadle.wire.openai import ChatLogprob, ChatLogprobs, CompletionLogprobs, TokenLogprob


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
