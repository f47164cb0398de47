"""Messages of POST /treadle/generate (middleware.py): build requests, convert outputs. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from treadle.engines.interface import Delta, Generation, Request, Sampled
from treadle.engines.tokenizer import UNFINISHED

GENERATE = "/treadle/generate"
_LARGEST_SEED = 2**63 - 1
# vLLM takes the smallest first (--scheduling-policy priority). One token is a question about its prompt, such as a
# publish's canary: it costs little, and somebody waits for it.
FIRST, IN_LINE = 0, 1

Decode = Callable[[Sequence[int], Sequence[int]], str]  # a prompt and what was sampled after it, to the latter's text


class Order(msgspec.Struct):
    """What vLLM is to generate. `sampling` has the names of its SamplingParams."""

    model: str  # or an adapter, by vLLM's name for it
    prompt_ids: list[int]
    sampling: dict[str, Any]
    cache_salt: str  # prefixes are shared among requests with the same one
    priority: int = IN_LINE
    stream: bool = False


class Choice(msgspec.Struct, omit_defaults=True):
    index: int
    token_ids: list[int] = []
    logprobs: list[float] = []
    tops: list[dict[int, float]] = []  # the likeliest tokens of each position, when they were asked for
    text: str | None = None  # None: vLLM was not asked to write it
    finish_reason: str | None = None


class Answer(msgspec.Struct, omit_defaults=True):
    """All of it, or one moment of a streamed one."""

    choices: list[Choice]
    prompt_tops: list[dict[int, float]] | None = None


decode_order = msgspec.json.Decoder(Order).decode
decode_answer = msgspec.json.Decoder(Answer).decode


def order_of(request: Request, *, model: str, eos_ids: frozenset[int], cache_salt: str, stream: bool) -> Order:
    """Every sampling field is said: what is left out, vLLM would decide."""
    asked = request.sampling
    ends = request.stop_ids if request.ignore_eos else request.stop_ids | eos_ids
    sampling: dict[str, Any] = {
        "n": num_asked(request),
        "max_tokens": request.max_tokens,
        "temperature": asked.temperature,
        "top_p": asked.top_p,
        "top_k": asked.top_k,
        "min_p": asked.min_p,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "stop": list(request.stop),
        "stop_token_ids": sorted(ends),
        "ignore_eos": request.ignore_eos,
        "seed": None if request.seed is None else request.seed & _LARGEST_SEED,
        "logprobs": request.num_top,
        "prompt_logprobs": request.num_prompt_top,
        # Written token by token, text costs vLLM's API process more than all else; whole, next to nothing.
        "detokenize": stream or bool(request.stop),
    }
    priority = FIRST if request.max_tokens == 1 else IN_LINE
    return Order(model, request.prompt_ids, sampling, cache_salt, priority, stream)


def num_asked(request: Request) -> int:
    """At temperature 0 all completions are the same one, and vLLM refuses to make it twice."""
    return 1 if request.sampling.temperature == 0 else request.n


def as_generation(
    answer: Answer, request: Request, policy_versions: Sequence[int], seconds: float, decode: Decode
) -> Generation:
    choices = sorted(answer.choices, key=lambda choice: choice.index)
    copies = request.n // len(choices)
    completions = [
        _sampled(choice, request, list(policy_versions), decode) for choice in choices for _ in range(copies)
    ]
    return Generation(completions, answer.prompt_tops, seconds)


def as_deltas(answer: Answer, request: Request, policy_version: int) -> list[Delta]:
    """Those of one moment; one that brings nothing is left out."""
    return [
        Delta(
            index=index,
            token_ids=choice.token_ids,
            logprobs=choice.logprobs,
            tops=choice.tops,
            text=choice.text or "",
            finish_reason=choice.finish_reason,
            policy_version=policy_version,
        )
        for choice in answer.choices
        if choice.token_ids or choice.text or choice.finish_reason
        for index in ([choice.index] if num_asked(request) == request.n else range(request.n))
    ]


def _sampled(choice: Choice, request: Request, policy_versions: list[int], decode: Decode) -> Sampled:
    return Sampled(
        token_ids=list(choice.token_ids),
        logprobs=list(choice.logprobs),
        tops=list(choice.tops),
        finish_reason=choice.finish_reason,
        text=_decoded(choice, request, decode) if choice.text is None else choice.text,
        policy_versions=policy_versions,
    )


def _decoded(choice: Choice, request: Request, decode: Decode) -> str:
    """Without the token that ended it, and without a last character that is not whole, as in a stream of vLLM.

    No stop string was set: with one, vLLM writes the text itself.
    """
    token_ids = choice.token_ids[:-1] if choice.finish_reason == "stop" else choice.token_ids
    return decode(request.prompt_ids, token_ids).rstrip(UNFINISHED)
