"""POST /generate as Atropos' clients speak it, whole or streamed; and the two health checks."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import fields

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from treadle.engines.port import Delta, Generation, Request, Sampled
from treadle.engines.surface.ask import MAX_PROMPTS, Ask, request_of
from treadle.engines.surface.http import decode, nobody_reads, route
from treadle.engines.surface.served import Served
from treadle.engines.surface.side_by_side import generate_all
from treadle.errors import EngineError, RequestError, TreadleError
from treadle.net.bodies import json_answer, unless_gone
from treadle.wire.generate import EngineHealth, GenerateAnswer, GenerateChunk, GenerateRequest, Prompt

HEALTH_DEADLINE_S = 30.0


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
