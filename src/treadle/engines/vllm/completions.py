"""Messages of POST /treadle/generate (middleware.py): build requests, convert outputs. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from treadle.engines.interface import CompletionDelta, GenerationResult, Request, SampledCompletion
from treadle.engines.tokenizer import INCOMPLETE_CHAR

GENERATE = "/treadle/generate"
LOAD = "/treadle/load"
_LARGEST_SEED = 2**63 - 1
# vLLM schedules the smallest number first (--scheduling-policy priority). A request for one token is a question about
# its prompt, such as the canary of a publish: it is cheap, and a trainer waits for it.
HIGH_PRIORITY, NORMAL_PRIORITY = 0, 1

Decode = Callable[[Sequence[int], Sequence[int]], str]  # (prompt ids, sampled ids) -> text of the sampled ids


class VllmRequest(msgspec.Struct):
    """Body of POST /treadle/generate. `sampling`: arguments of vLLM's SamplingParams."""

    model: str  # MODEL_NAME, or vLLM's name of an adapter
    prompt_ids: list[int]
    sampling: dict[str, Any]
    cache_salt: str  # only requests with the same salt share cached prefixes
    priority: int = NORMAL_PRIORITY
    stream: bool = False


class VllmLoad(msgspec.Struct):
    """Answer of POST /treadle/load. The numbers are None if vLLM keeps no statistics (--disable-log-stats)."""

    failure: str | None = None  # why vLLM cannot generate
    num_running: int | None = None  # sequences, by vLLM's scheduler
    num_waiting: int | None = None
    kv_cache_usage: float = 0.0

    def count_sequences(self, num_in_vllm: int, max_num_seqs: int) -> tuple[int, int]:
        """Running and waiting sequences: vLLM's own numbers, or estimates if it reports none.

        vLLM knows what its KV cache has no room for, and which completions of a request have finished. Its numbers are
        from its last step: they are limited to `num_in_vllm`, and zeros are ignored while it has requests.

        >>> VllmLoad(num_running=12, num_waiting=20).count_sequences(40, 32)
        (12, 20)
        >>> VllmLoad().count_sequences(40, 32), VllmLoad(num_running=12, num_waiting=20).count_sequences(0, 32)
        ((32, 8), (0, 0))
        """
        if self.num_running or self.num_waiting:
            return min(self.num_running or 0, num_in_vllm), min(self.num_waiting or 0, num_in_vllm)
        num_running = min(num_in_vllm, max_num_seqs)
        return num_running, num_in_vllm - num_running


class VllmChoice(msgspec.Struct, omit_defaults=True):
    """One completion of a VllmOutput."""

    index: int
    token_ids: list[int] = []
    logprobs: list[float] = []
    tops: list[dict[int, float]] = []  # top tokens of each position, if requested
    text: str | None = None  # None: vLLM did not detokenize it
    finish_reason: str | None = None


class VllmOutput(msgspec.Struct, omit_defaults=True):
    """Response of POST /treadle/generate, or one line of a streamed response."""

    choices: list[VllmChoice]
    prompt_tops: list[dict[int, float]] | None = None


decode_request = msgspec.json.Decoder(VllmRequest).decode
decode_output = msgspec.json.Decoder(VllmOutput).decode


def build_vllm_request(
    request: Request, *, model: str, eos_ids: frozenset[int], cache_salt: str, stream: bool
) -> VllmRequest:
    """Set every sampling field, so that no default of vLLM applies."""
    params = request.sampling
    end_ids = request.stop_ids if request.ignore_eos else request.stop_ids | eos_ids
    sampling: dict[str, Any] = {
        "n": num_samples(request),
        "max_tokens": request.max_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "min_p": params.min_p,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "stop": list(request.stop),
        "stop_token_ids": sorted(end_ids),
        "ignore_eos": request.ignore_eos,
        "seed": None if request.seed is None else request.seed & _LARGEST_SEED,
        "logprobs": request.num_top,
        "prompt_logprobs": request.num_prompt_top,
        # Detokenizing token by token is the largest cost of vLLM's API process; decoding once at the end is cheap.
        "detokenize": stream or bool(request.stop),
    }
    priority = HIGH_PRIORITY if request.max_tokens == 1 else NORMAL_PRIORITY
    return VllmRequest(model, request.prompt_ids, sampling, cache_salt, priority, stream)


def num_samples(request: Request) -> int:
    """At temperature 0 all completions are equal, and vLLM refuses n > 1."""
    return 1 if request.sampling.temperature == 0 else request.n


def to_result(
    answer: VllmOutput, request: Request, policy_versions: Sequence[int], seconds: float, decode: Decode
) -> GenerationResult:
    choices = sorted(answer.choices, key=lambda choice: choice.index)
    copies = request.n // len(choices)
    completions = [
        _sampled(choice, request, list(policy_versions), decode) for choice in choices for _ in range(copies)
    ]
    return GenerationResult(completions, answer.prompt_tops, seconds)


def to_deltas(answer: VllmOutput, request: Request, policy_version: int) -> list[CompletionDelta]:
    """The deltas of one output; empty ones are left out."""
    return [
        CompletionDelta(
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
        for index in ([choice.index] if num_samples(request) == request.n else range(request.n))
    ]


def _sampled(choice: VllmChoice, request: Request, policy_versions: list[int], decode: Decode) -> SampledCompletion:
    text = choice.text
    if text is None:  # without stop strings; with one, vLLM detokenizes itself
        # Without the stop token and without an incomplete last character, like vLLM's streams.
        token_ids = choice.token_ids[:-1] if choice.finish_reason == "stop" else choice.token_ids
        text = decode(request.prompt_ids, token_ids).rstrip(INCOMPLETE_CHAR)
    return SampledCompletion(
        token_ids=list(choice.token_ids),
        logprobs=list(choice.logprobs),
        tops=list(choice.tops),
        finish_reason=choice.finish_reason,
        text=text,
        policy_versions=policy_versions,
    )
