"""From what a client asks for to a checked `Request`: the same limits on every route."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from treadle.engines.port import EngineFacts, Request
from treadle.engines.sampling import SamplingParams
from treadle.errors import RequestError
from treadle.wire.generate import MAX_STOP_CHARS, MAX_STOP_STRINGS, MIN_TEMPERATURE, Wave

MAX_PROMPTS = 256  # in one request
MAX_STOP_IDS = 1024
MAX_LOGPROBS = 20  # likeliest tokens a position; more make answers of many megabytes


@dataclass(frozen=True, kw_only=True)
class Ask:
    """What a client may set, in the words of the wire."""

    n: int = 1
    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Iterable[int] | None = None
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    wave: Wave | None = None
    adapter: str | None = None


def request_of(prompt_ids: object, ask: Ask, facts: EngineFacts) -> Request:
    """`request_of([1, 2, 3], Ask(max_tokens=8), engine.facts)`; raises RequestError with what is wrong."""
    ids = _checked_ids(prompt_ids, facts.vocab_size)
    if ask.n < 1 or ask.max_tokens < 1:
        raise RequestError("n and max_tokens must be at least 1")
    if ask.n > facts.max_num_seqs:
        raise RequestError(f"n={ask.n} is over --max-num-seqs {facts.max_num_seqs}")
    if not (0 <= ask.temperature <= 100 and 0 < ask.top_p <= 1 and 0 <= ask.min_p <= 1 and ask.top_k >= -1):
        raise RequestError("temperature, top_p, top_k or min_p is out of range")
    if len(ids) + ask.max_tokens > facts.max_model_len:
        raise RequestError(
            f"{len(ids)} prompt and {ask.max_tokens} new tokens exceed --max-model-len {facts.max_model_len}"
        )
    stop = (ask.stop,) if isinstance(ask.stop, str) else tuple(ask.stop or ())
    if len(stop) > MAX_STOP_STRINGS or not all(0 < len(word) <= MAX_STOP_CHARS for word in stop):
        raise RequestError(f"stop takes at most {MAX_STOP_STRINGS} strings, each of 1 to {MAX_STOP_CHARS} characters")
    stop_ids = frozenset(ask.stop_token_ids or ())
    if len(stop_ids) > MAX_STOP_IDS:
        raise RequestError(f"stop_token_ids takes at most {MAX_STOP_IDS} of them, not {len(stop_ids)}")
    if not all(0 <= token < facts.vocab_size for token in stop_ids):  # vLLM refuses them, or cannot write them down
        raise RequestError(f"stop_token_ids must be whole numbers from 0 to {facts.vocab_size - 1}")
    for count in (ask.logprobs, ask.prompt_logprobs):
        if count is not None and not 0 <= count <= MAX_LOGPROBS:
            raise RequestError(f"logprobs of {count} tokens a position were asked for; 0 to {MAX_LOGPROBS} can be had")
    return Request(
        prompt_ids=ids,
        n=ask.n,
        max_tokens=ask.max_tokens,
        sampling=SamplingParams(
            # Both engines get the same: vLLM would raise some of these to 0.01, and take others for 0.
            0.0 if ask.temperature < MIN_TEMPERATURE else ask.temperature,
            ask.top_p,
            max(ask.top_k, 0) if ask.top_k < facts.vocab_size else 0,  # all of them: it rules out nothing
            ask.min_p,
        ),
        seed=ask.seed,
        stop=stop,
        stop_ids=stop_ids,
        ignore_eos=ask.ignore_eos,
        num_top=ask.logprobs or 0,
        num_prompt_top=ask.prompt_logprobs,
        wave=ask.wave,
        adapter=ask.adapter,
    )


def _checked_ids(ids: object, vocab_size: int) -> list[int]:
    if not isinstance(ids, list) or not ids:
        raise RequestError('prompt must be text or {"prompt_token_ids": [...]}, and not empty')
    if not all(type(i) is int and 0 <= i < vocab_size for i in ids):
        raise RequestError(f"prompt_token_ids must be whole numbers from 0 to {vocab_size - 1}")
    return ids
