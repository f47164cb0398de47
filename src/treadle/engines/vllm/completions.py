"""The words of vLLM's /v1/completions: a request of ours put into them, and their answers read. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from treadle.engines.port import Delta, Generation, Request, Sampled

_ID = "token_id:"  # how vLLM writes a token where it would write its text (return_tokens_as_token_ids)
_LARGEST_SEED = 2**63 - 1
# vLLM takes the smallest first (--scheduling-policy priority). One token is a question about its prompt, such as a
# publish's canary: it costs little, and somebody waits for it.
FIRST, IN_LINE = 0, 1


class Logprobs(msgspec.Struct):
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] = []


class PromptLogprob(msgspec.Struct):
    logprob: float


class Choice(msgspec.Struct):
    index: int
    text: str
    token_ids: list[int] | None = None
    logprobs: Logprobs | None = None
    finish_reason: str | None = None
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | None = None


class Completions(msgspec.Struct):
    """A whole answer, or one event of a streamed one."""

    choices: list[Choice]


decode_answer = msgspec.json.Decoder(Completions).decode


def completions_body(
    request: Request, *, model: str, eos_ids: frozenset[int], cache_salt: str, stream: bool
) -> dict[str, Any]:
    """Every sampling field is said: what is left out, vLLM would decide."""
    sampling = request.sampling
    ends = request.stop_ids if request.ignore_eos else request.stop_ids | eos_ids
    body: dict[str, Any] = {
        "model": model,
        "prompt": request.prompt_ids,
        "n": num_asked(request),
        "max_tokens": request.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "stop": list(request.stop),
        "stop_token_ids": sorted(ends),
        "ignore_eos": request.ignore_eos,
        "logprobs": request.num_top,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        "add_special_tokens": False,
        "cache_salt": cache_salt,
        "priority": FIRST if request.max_tokens == 1 else IN_LINE,
        "stream": stream,
    }
    if request.seed is not None:
        body["seed"] = request.seed & _LARGEST_SEED
    if request.num_prompt_top is not None:
        body["prompt_logprobs"] = request.num_prompt_top
    return body


def num_asked(request: Request) -> int:
    """At temperature 0 all completions are the same one, and vLLM refuses to make it twice."""
    return 1 if request.sampling.temperature == 0 else request.n


def as_generation(answer: Completions, request: Request, policy_versions: Sequence[int], seconds: float) -> Generation:
    choices = sorted(answer.choices, key=lambda choice: choice.index)
    copies = request.n // len(choices)
    completions = [_sampled(choice, request, list(policy_versions)) for choice in choices for _ in range(copies)]
    return Generation(completions, _prompt_tops(choices[0], request), seconds)


def as_deltas(event: Completions, request: Request, policy_version: int) -> list[Delta]:
    """The deltas of one event; one that brings nothing is left out."""
    return [
        Delta(
            index=index,
            token_ids=choice.token_ids or [],
            logprobs=_logprobs(choice),
            tops=_tops(choice, request),
            text=choice.text,
            finish_reason=choice.finish_reason,
            policy_version=policy_version,
        )
        for choice in event.choices
        if choice.token_ids or choice.text or choice.finish_reason
        for index in ([choice.index] if num_asked(request) == request.n else range(request.n))
    ]


def _sampled(choice: Choice, request: Request, policy_versions: list[int]) -> Sampled:
    return Sampled(
        token_ids=list(choice.token_ids or []),
        logprobs=_logprobs(choice),
        tops=_tops(choice, request),
        finish_reason=choice.finish_reason,
        text=choice.text,
        policy_versions=policy_versions,
    )


def _logprobs(choice: Choice) -> list[float]:
    given = choice.logprobs.token_logprobs if choice.logprobs else []
    return [logprob for logprob in given if logprob is not None]


def _tops(choice: Choice, request: Request) -> list[dict[int, float]]:
    """The likeliest tokens; vLLM lists the sampled one beside them even when it is none of those."""
    if not request.num_top or choice.logprobs is None:
        return []
    tops = []
    for top in choice.logprobs.top_logprobs:
        likeliest = sorted((top or {}).items(), key=lambda entry: -entry[1])[: request.num_top]
        tops.append({int(key.removeprefix(_ID)): logprob for key, logprob in likeliest})
    return tops


def _prompt_tops(choice: Choice, request: Request) -> list[dict[int, float]] | None:
    if request.num_prompt_top is None:
        return None
    return [{int(token): lp.logprob for token, lp in (top or {}).items()} for top in choice.prompt_logprobs or []]
