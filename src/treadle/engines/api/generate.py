"""Validate generation requests and run them; POST /generate (Atropos' protocol) and the two health checks.

`build_request` applies the same limits on every route, those of api/openai.py included.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, fields, replace

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from treadle.engines.api.context import CLIENT_LEFT, ApiContext, decode, route
from treadle.engines.interface import (
    CompletionDelta,
    EngineFacts,
    GenerationResult,
    InferenceEngine,
    Request,
    SampledCompletion,
)
from treadle.engines.sampling import SamplingParams
from treadle.errors import EngineError, RequestError, TreadleError
from treadle.net.server import json_answer, unless_gone
from treadle.wire.generate import (
    MAX_STOP_CHARS,
    MAX_STOP_STRINGS,
    MIN_TEMPERATURE,
    UNKNOWN_MODEL,
    EngineHealth,
    GenerateAnswer,
    GenerateChunk,
    GenerateRequest,
    Prompt,
    Wave,
)

MAX_PROMPTS = 256  # in one request
MAX_STOP_IDS = 1024
MAX_LOGPROBS = 20  # top tokens per position; more would make responses of many megabytes
HEALTH_DEADLINE_S = 30.0


@dataclass(frozen=True, kw_only=True)
class GenerationOptions:
    """Options that a client may set, with the field names of the API."""

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


def build_request(prompt_ids: object, options: GenerationOptions, facts: EngineFacts) -> Request:
    """Validate token ids and options against the engine's limits; raises RequestError."""
    ids = _checked_ids(prompt_ids, facts.vocab_size)
    if options.n < 1 or options.max_tokens < 1:
        raise RequestError("n and max_tokens must be at least 1")
    if options.n > facts.max_num_seqs:
        raise RequestError(f"n={options.n} is over --max-num-seqs {facts.max_num_seqs}")
    if not (
        0 <= options.temperature <= 100 and 0 < options.top_p <= 1 and 0 <= options.min_p <= 1 and options.top_k >= -1
    ):
        raise RequestError("temperature, top_p, top_k or min_p is out of range")
    if len(ids) + options.max_tokens > facts.max_model_len:
        raise RequestError(
            f"{len(ids)} prompt and {options.max_tokens} new tokens exceed --max-model-len {facts.max_model_len}"
        )
    stop = (options.stop,) if isinstance(options.stop, str) else tuple(options.stop or ())
    if len(stop) > MAX_STOP_STRINGS or not all(0 < len(word) <= MAX_STOP_CHARS for word in stop):
        raise RequestError(f"stop takes at most {MAX_STOP_STRINGS} strings, each of 1 to {MAX_STOP_CHARS} characters")
    stop_ids = frozenset(options.stop_token_ids or ())
    if len(stop_ids) > MAX_STOP_IDS:
        raise RequestError(f"stop_token_ids takes at most {MAX_STOP_IDS} of them, not {len(stop_ids)}")
    if not all(0 <= token < facts.vocab_size for token in stop_ids):  # vLLM rejects them, or fails on them
        raise RequestError(f"stop_token_ids must be whole numbers from 0 to {facts.vocab_size - 1}")
    for count in (options.logprobs, options.prompt_logprobs):
        if count is not None and not 0 <= count <= MAX_LOGPROBS:
            raise RequestError(f"logprobs of {count} tokens a position were asked for; 0 to {MAX_LOGPROBS} can be had")
    return Request(
        prompt_ids=ids,
        n=options.n,
        max_tokens=options.max_tokens,
        sampling=SamplingParams(
            # Same for both engines: vLLM would raise some small temperatures to 0.01 and take others for 0.
            0.0 if options.temperature < MIN_TEMPERATURE else options.temperature,
            options.top_p,
            max(options.top_k, 0) if options.top_k < facts.vocab_size else 0,  # the whole vocabulary: no truncation
            options.min_p,
        ),
        seed=options.seed,
        stop=stop,
        stop_ids=stop_ids,
        ignore_eos=options.ignore_eos,
        num_top=options.logprobs or 0,
        num_prompt_top=options.prompt_logprobs,
        wave=options.wave,
        adapter=options.adapter,
    )


def _checked_ids(ids: object, vocab_size: int) -> list[int]:
    if not isinstance(ids, list) or not ids:
        raise RequestError('prompt must be text or {"prompt_token_ids": [...]}, and not empty')
    if not all(type(i) is int and 0 <= i < vocab_size for i in ids):
        raise RequestError(f"prompt_token_ids must be whole numbers from 0 to {vocab_size - 1}")
    return ids


async def generate_all(engine: InferenceEngine, requests: Sequence[Request]) -> list[GenerationResult]:
    """Run requests concurrently; results in order. If one fails, the others are cancelled."""
    tasks = [asyncio.ensure_future(engine.generate(request)) for request in requests]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


async def merge_streams(
    streams: Sequence[AsyncIterator[CompletionDelta]],
) -> AsyncIterator[tuple[int, CompletionDelta]]:
    """Yield (stream index, delta) from all streams as they come; an error of one ends all."""
    queue: asyncio.Queue[tuple[int, CompletionDelta] | BaseException | None] = asyncio.Queue()

    async def pump(index: int, stream: AsyncIterator[CompletionDelta]) -> None:
        try:
            async for delta in stream:
                queue.put_nowait((index, delta))
        except Exception as error:
            queue.put_nowait(error)
        else:
            queue.put_nowait(None)

    tasks = [asyncio.ensure_future(pump(index, stream)) for index, stream in enumerate(streams)]
    num_open = len(tasks)
    try:
        while num_open:
            item = await queue.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                num_open -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def generate_routes(context: ApiContext) -> list[Route]:
    engine = context.engine

    async def generate(http: HttpRequest) -> Response:
        body = await decode(http, GenerateRequest)
        prompts = _prompts(body)
        options = GenerationOptions(**{field.name: getattr(body, field.name) for field in fields(GenerationOptions)})
        if options.adapter is None and body.model != UNKNOWN_MODEL:
            options = replace(options, adapter=context.adapter_named(body.model))
        encoded = [context.encode(p) if isinstance(p, str) else p.get("prompt_token_ids") for p in prompts]
        requests = [build_request(ids, options, engine.facts) for ids in encoded]
        if body.stream:
            if body.prompt_logprobs is not None:
                raise RequestError("a streamed answer has no prompt_logprobs", fix='leave "stream" out')
            return StreamingResponse(_lines(context, body, prompts[0], requests[0]), media_type="application/x-ndjson")
        generations = await unless_gone(http, generate_all(engine, requests))
        if generations is None:
            return Response(status_code=CLIENT_LEFT)
        answers = [_answer(context, body, *each) for each in zip(prompts, requests, generations, strict=True)]
        return json_answer(answers if isinstance(body.prompt, list) else answers[0])

    async def health(_: HttpRequest) -> Response:
        state = await engine.status()
        body = EngineHealth(
            status="paused" if state.is_held else "ok",
            model=str(engine.facts.folder),
            policy_version=state.policy_version,
            num_running=state.num_running,
            num_waiting=state.num_waiting,
            generated_tokens=state.generated_tokens,
            generating_s=state.generating_s,
            kv_cache_usage=state.kv_cache_usage,
            max_num_seqs=engine.facts.max_num_seqs,
        )
        if state.failure is not None:
            body.status = f"failed: {state.failure}"
        return json_answer(body, 200 if state.failure is None else 503)

    async def health_generate(_: HttpRequest) -> Response:
        started = time.monotonic()
        request = build_request([0], GenerationOptions(max_tokens=1, temperature=0.0), engine.facts)
        try:
            async with asyncio.timeout(HEALTH_DEADLINE_S):
                await engine.generate(request)
        except TimeoutError:
            is_held = (await engine.status()).is_held
            why = "the engine is paused" if is_held else "the engine is stuck or overloaded"
            raise EngineError(f"no token within {HEALTH_DEADLINE_S:.0f} s: {why}") from None
        return json_answer({"status": "ok", "seconds": time.monotonic() - started})

    return [
        route("/generate", generate, context.stats, method="POST"),
        route("/health", health, context.stats),
        route("/health_generate", health_generate, context.stats),
    ]


def _prompts(body: GenerateRequest) -> list[Prompt]:
    if body.return_text_in_logprobs or body.background or body.return_bytes or body.return_entropy:
        raise RequestError(
            "return_text_in_logprobs, background, return_bytes and return_entropy are not offered", fix="leave them out"
        )
    if (body.prompt is None) == (body.input_ids is None):
        raise RequestError("a request has either prompt or input_ids", fix="give one of them")
    if body.prompt is None:
        return [{"prompt_token_ids": body.input_ids}]
    prompts = body.prompt if isinstance(body.prompt, list) else [body.prompt]
    if not 0 < len(prompts) <= MAX_PROMPTS:
        raise RequestError(f"a list must hold 1 to {MAX_PROMPTS} prompts, not {len(prompts)}")
    if isinstance(body.prompt, list) and (body.stream or body.wave is not None):
        raise RequestError('a list of prompts takes neither "stream" nor "wave"', fix="send a request for each prompt")
    return prompts


async def _lines(context: ApiContext, body: GenerateRequest, prompt: Prompt, request: Request) -> AsyncIterator[bytes]:
    """JSON lines: one per delta, then the full response. An error is a line too, as the status has been sent."""
    started = time.monotonic()
    completions = [SampledCompletion() for _ in range(request.n)]
    try:
        async with contextlib.aclosing(context.engine.stream(request)) as stream:  # type: ignore[type-var]
            async for delta in stream:
                _append_delta(completions[delta.index], delta)
                chunk = GenerateChunk(
                    index=delta.index,
                    text=delta.text,
                    token_ids=delta.token_ids,
                    policy_version=delta.policy_version,
                    logprobs=_logprobs(delta) if body.logprobs is not None else None,
                    finish_reason=delta.finish_reason,
                )
                yield msgspec.json.encode(chunk) + b"\n"
    except TreadleError as error:
        yield msgspec.json.encode({"error": str(error)}) + b"\n"
        return
    result = GenerationResult(completions, seconds=time.monotonic() - started)
    yield msgspec.json.encode(_answer(context, body, prompt, request, result)) + b"\n"


def _append_delta(sampled: SampledCompletion, delta: CompletionDelta) -> None:
    sampled.token_ids += delta.token_ids
    sampled.logprobs += delta.logprobs
    sampled.tops += delta.tops
    sampled.text += delta.text
    sampled.finish_reason = delta.finish_reason
    if delta.policy_version not in sampled.policy_versions:
        sampled.policy_versions.append(delta.policy_version)


def _answer(
    context: ApiContext, body: GenerateRequest, prompt: Prompt, request: Request, generation: GenerationResult
) -> GenerateAnswer:
    completions, tops = generation.completions, generation.prompt_tops
    return GenerateAnswer(
        text=[s.text for s in completions],
        prompt=prompt if isinstance(prompt, str) else context.engine.tokenizer.decode(request.prompt_ids),
        finish_reasons=[s.finish_reason or "length" for s in completions],
        token_ids=[s.token_ids for s in completions],
        prompt_token_ids=request.prompt_ids,
        policy_version=oldest_version(completions),
        policy_versions=[s.policy_versions for s in completions],
        logprobs=[_logprobs(s) for s in completions] if body.logprobs is not None else None,
        prompt_logprobs=None if tops is None else [_named(top) or None for top in tops],
        num_tokens=sum(len(s.token_ids) for s in completions),
        seconds=generation.seconds,
        engine_id=context.engine_id,
    )


def oldest_version(completions: list[SampledCompletion]) -> int:
    return min(version for s in completions for version in s.policy_versions)


def _logprobs(sampled: SampledCompletion | CompletionDelta) -> list[list[dict[str, float]]]:
    """Per token a list with one dict: the sampled token first, then the top tokens."""
    tops = sampled.tops or [{}] * len(sampled.token_ids)
    return [
        [{str(token): logprob} | _named(top, but=token)]
        for token, logprob, top in zip(sampled.token_ids, sampled.logprobs, tops, strict=True)
    ]


def _named(top: dict[int, float], but: int | None = None) -> dict[str, float]:
    return {str(token): logprob for token, logprob in top.items() if token != but}
