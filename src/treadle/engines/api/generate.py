"""Validate generation requests and run them; POST /generate (Atropos' protocol) and the two health checks.

`build_request` applies the same limits on every route, those of api/openai.py included.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, fields

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from treadle.engines.api.context import Served
from treadle.engines.api.http import decode, nobody_reads, route
from treadle.engines.interface import Delta, Engine, EngineFacts, Generation, Request, Sampled
from treadle.engines.sampling import SamplingParams
from treadle.errors import EngineError, RequestError, TreadleError
from treadle.net.bodies import json_answer, unless_gone
from treadle.wire.generate import (
    MAX_STOP_CHARS,
    MAX_STOP_STRINGS,
    MIN_TEMPERATURE,
    EngineHealth,
    GenerateAnswer,
    GenerateChunk,
    GenerateRequest,
    Prompt,
    Wave,
)

MAX_PROMPTS = 256  # in one request
MAX_STOP_IDS = 1024
MAX_LOGPROBS = 20  # likeliest tokens a position; more make answers of many megabytes
HEALTH_DEADLINE_S = 30.0


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


async def generate_all(engine: Engine, requests: Sequence[Request]) -> list[Generation]:
    """The answers, in order; when a request fails, the others are cancelled."""
    tasks = [asyncio.ensure_future(engine.generate(request)) for request in requests]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


async def merged(streams: Sequence[AsyncIterator[Delta]]) -> AsyncIterator[tuple[int, Delta]]:
    """(which stream, what came); the error of any of them ends all."""
    came: asyncio.Queue[tuple[int, Delta] | BaseException | None] = asyncio.Queue()

    async def pump(place: int, stream: AsyncIterator[Delta]) -> None:
        try:
            async for delta in stream:
                came.put_nowait((place, delta))
        except Exception as error:
            came.put_nowait(error)
        else:
            came.put_nowait(None)

    tasks = [asyncio.ensure_future(pump(place, stream)) for place, stream in enumerate(streams)]
    num_open = len(tasks)
    try:
        while num_open:
            part = await came.get()
            if isinstance(part, BaseException):
                raise part
            if part is None:
                num_open -= 1
            else:
                yield part
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def generate_routes(served: Served) -> list[Route]:
    engine = served.engine

    async def generate(http: HttpRequest) -> Response:
        body = await decode(http, GenerateRequest)
        prompts = _prompts(body)
        requests = [request_of(_encoded(served, prompt), _ask(body), engine.facts) for prompt in prompts]
        if body.stream:
            if body.prompt_logprobs is not None:
                raise RequestError("a streamed answer has no prompt_logprobs", fix='leave "stream" out')
            return StreamingResponse(_lines(served, body, prompts[0], requests[0]), media_type="application/x-ndjson")
        generations = await unless_gone(http, generate_all(engine, requests))
        if generations is None:
            return nobody_reads()
        answers = [_answer(served, body, *each) for each in zip(prompts, requests, generations, strict=True)]
        return json_answer(answers if isinstance(body.prompt, list) else answers[0])

    async def health(_: HttpRequest) -> Response:
        state = await engine.state()
        told = EngineHealth(
            status="paused" if state.is_held else "ok",
            model=str(engine.facts.folder),
            policy_version=state.policy_version,
            num_running=state.num_running,
            num_waiting=state.num_waiting,
            generated_tokens=state.generated_tokens,
            generating_s=state.generating_s,
        )
        if state.failure is not None:
            told.status = f"failed: {state.failure}"
        return json_answer(told, 200 if state.failure is None else 503)

    async def health_generate(_: HttpRequest) -> Response:
        started = time.monotonic()
        request = request_of([0], Ask(max_tokens=1, temperature=0.0), engine.facts)
        try:
            async with asyncio.timeout(HEALTH_DEADLINE_S):
                await engine.generate(request)
        except TimeoutError:
            is_held = (await engine.state()).is_held
            why = "it is paused" if is_held else "it is stuck, or much too busy"
            raise EngineError(f"no token within {HEALTH_DEADLINE_S:.0f} s: {why}") from None
        return json_answer({"status": "ok", "seconds": time.monotonic() - started})

    return [
        route("/generate", generate, served.ledger, method="POST"),
        route("/health", health, served.ledger),
        route("/health_generate", health_generate, served.ledger),
    ]


def _prompts(body: GenerateRequest) -> list[Prompt]:
    prompts = body.prompt if isinstance(body.prompt, list) else [body.prompt]
    if not 0 < len(prompts) <= MAX_PROMPTS:
        raise RequestError(f"a list must hold 1 to {MAX_PROMPTS} prompts, not {len(prompts)}")
    if isinstance(body.prompt, list) and (body.stream or body.wave is not None):
        raise RequestError('a list of prompts takes neither "stream" nor "wave"', fix="send a request for each prompt")
    return prompts


def _encoded(served: Served, prompt: Prompt) -> object:
    """The prompt's token ids, unchecked: `request_of` checks them."""
    return served.encode(prompt) if isinstance(prompt, str) else prompt.get("prompt_token_ids")


def _ask(body: GenerateRequest) -> Ask:
    return Ask(**{field.name: getattr(body, field.name) for field in fields(Ask)})  # they have the same names


async def _lines(served: Served, body: GenerateRequest, prompt: Prompt, request: Request) -> AsyncIterator[bytes]:
    """What is new, line by line as JSON, and the whole answer at the end. An error is a line too: it is too late for a
    status."""
    started = time.monotonic()
    gathered = [Sampled() for _ in range(request.n)]
    try:
        async with contextlib.aclosing(served.engine.stream(request)) as stream:  # type: ignore[type-var]
            async for delta in stream:
                gather(gathered[delta.index], delta)
                yield msgspec.json.encode(_chunk(delta, wants_logprobs=body.logprobs is not None)) + b"\n"
    except TreadleError as error:
        yield msgspec.json.encode({"error": str(error)}) + b"\n"
        return
    whole = Generation(gathered, seconds=time.monotonic() - started)
    yield msgspec.json.encode(_answer(served, body, prompt, request, whole)) + b"\n"


def gather(sampled: Sampled, delta: Delta) -> None:
    """Add what is new to what there was."""
    sampled.token_ids += delta.token_ids
    sampled.logprobs += delta.logprobs
    sampled.tops += delta.tops
    sampled.text += delta.text
    sampled.finish_reason = delta.finish_reason
    if delta.policy_version not in sampled.policy_versions:
        sampled.policy_versions.append(delta.policy_version)


def _chunk(delta: Delta, *, wants_logprobs: bool) -> GenerateChunk:
    return GenerateChunk(
        index=delta.index,
        text=delta.text,
        token_ids=delta.token_ids,
        policy_version=delta.policy_version,
        logprobs=_logprobs(delta) if wants_logprobs else None,
        finish_reason=delta.finish_reason,
    )


def _answer(
    served: Served, body: GenerateRequest, prompt: Prompt, request: Request, generation: Generation
) -> GenerateAnswer:
    completions, tops = generation.completions, generation.prompt_tops
    return GenerateAnswer(
        text=[s.text for s in completions],
        prompt=prompt if isinstance(prompt, str) else served.text.decode(request.prompt_ids),
        finish_reasons=[s.finish_reason or "length" for s in completions],
        token_ids=[s.token_ids for s in completions],
        prompt_token_ids=request.prompt_ids,
        policy_version=oldest_version(completions),
        policy_versions=[s.policy_versions for s in completions],
        logprobs=[_logprobs(s) for s in completions] if body.logprobs is not None else None,
        prompt_logprobs=None if tops is None else [_named(top) or None for top in tops],
        num_tokens=sum(len(s.token_ids) for s in completions),
        seconds=generation.seconds,
    )


def oldest_version(completions: list[Sampled]) -> int:
    return min(version for s in completions for version in s.policy_versions)


def _logprobs(sampled: Sampled | Delta) -> list[list[dict[str, float]]]:
    """Per token a one-element list that holds a dict: the sampled token first, then the likeliest others."""
    tops = sampled.tops or [{}] * len(sampled.token_ids)
    return [
        [{str(token): logprob} | _named(top, but=token)]
        for token, logprob, top in zip(sampled.token_ids, sampled.logprobs, tops, strict=True)
    ]


def _named(top: dict[int, float], but: int | None = None) -> dict[str, float]:
    return {str(token): logprob for token, logprob in top.items() if token != but}
