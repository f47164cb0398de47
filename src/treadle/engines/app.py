"""The engine's HTTP surface: POST /generate as Atropos' clients speak it, health, and the bridge for weights."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from treadle.engines.sampling import SamplingParams
from treadle.engines.scheduler import Finished, Scheduler
from treadle.engines.transformers_engine import Request, TransformersEngine
from treadle.errors import EngineError
from treadle.wire.generate import EngineHealth, GenerateAnswer, GenerateRequest

MAX_BODY_BYTES = 16 << 20
MAX_STOP_STRINGS = 16

T = TypeVar("T")
Handler = Callable[[HttpRequest], Awaitable[Response]]


class BadRequest(Exception):
    """A request that cannot be served; its text goes to the client."""


class Resume(msgspec.Struct):
    policy_version: int | None = None


def build_app(engine: TransformersEngine, scheduler: Scheduler, *, pause_timeout_s: float) -> Starlette:
    async def health(_: HttpRequest) -> Response:
        state = EngineHealth(
            status="paused" if scheduler.is_paused else "ok",
            model=str(engine.folder),
            policy_version=scheduler.policy_version,
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            generated_tokens=scheduler.generated_tokens,
            generating_s=scheduler.generating_s,
        )
        if scheduler.failure is not None:
            state.status = f"failed: {scheduler.failure}"
        return _json(state, 200 if scheduler.failure is None else 503)

    async def generate(http: HttpRequest) -> Response:
        body = await _decode(http, GenerateRequest)
        request = _check(body, engine)
        if request.n > scheduler.max_num_seqs:
            raise BadRequest(f"n={request.n} is over --max-num-seqs {scheduler.max_num_seqs}")
        finished = await asyncio.wrap_future(scheduler.submit(request, body.wave))
        return _json(_answer(body, request, finished, engine))

    async def pause(_: HttpRequest) -> Response:
        await asyncio.to_thread(scheduler.pause, pause_timeout_s)
        return _json({"status": "paused", "policy_version": scheduler.policy_version})

    async def resume(http: HttpRequest) -> Response:
        body = await _decode(http, Resume)
        scheduler.resume(body.policy_version)
        return _json({"status": "resumed", "policy_version": scheduler.policy_version})

    async def is_paused(_: HttpRequest) -> Response:
        return _json({"is_paused": scheduler.is_paused})

    async def info(_: HttpRequest) -> Response:
        return _json(
            {
                "enabled": True,
                "shared_weights": engine.layout is not None,
                "update_count": scheduler.policy_version,
                "model_name": str(engine.folder),
                "device": str(engine.device),
            }
        )

    async def state_dict_info(_: HttpRequest) -> Response:
        if engine.layout is None:
            return _error("this engine was started without --weights-file", 404)
        now = {"policy_version": scheduler.policy_version, "is_held": scheduler.is_paused}
        return _json(msgspec.structs.replace(engine.layout, **now))

    return Starlette(
        routes=[
            Route("/health", _guard(health)),
            Route("/generate", _guard(generate), methods=["POST"]),
            Route("/bridge/pause", _guard(pause), methods=["POST"]),
            Route("/bridge/resume", _guard(resume), methods=["POST"]),
            Route("/bridge/is_paused", _guard(is_paused)),
            Route("/bridge/info", _guard(info)),
            Route("/bridge/state_dict_info", _guard(state_dict_info)),
        ]
    )


def _guard(handler: Handler) -> Handler:
    """Turn our errors into answers: a bad request is 400, an engine that cannot serve is 503."""

    async def guarded(http: HttpRequest) -> Response:
        try:
            return await handler(http)
        except BadRequest as error:
            return _error(str(error), 400)
        except EngineError as error:
            return _error(str(error), 503)

    return guarded


async def _decode(http: HttpRequest, kind: type[T]) -> T:
    kind_of_body = http.headers.get("content-type", "application/json")
    if not kind_of_body.startswith("application/json"):
        raise BadRequest(f"the body must be application/json, not {kind_of_body[:60]}")
    raw = bytearray()
    async for chunk in http.stream():
        raw += chunk
        if len(raw) > MAX_BODY_BYTES:
            raise BadRequest(f"the body is larger than {MAX_BODY_BYTES >> 20} MiB")
    try:
        return msgspec.json.decode(raw or b"{}", type=kind)
    except (msgspec.ValidationError, msgspec.DecodeError) as error:
        raise BadRequest(str(error)) from None


def _check(body: GenerateRequest, engine: TransformersEngine) -> Request:
    prompt_ids = _prompt_ids(body, engine)
    if body.stream or body.prompt_logprobs is not None:
        raise BadRequest("stream and prompt_logprobs are not offered by this engine yet")
    if body.n < 1 or body.max_tokens < 1:
        raise BadRequest("n and max_tokens must be at least 1")
    if not (0 <= body.temperature <= 100 and 0 < body.top_p <= 1 and 0 <= body.min_p <= 1 and body.top_k >= -1):
        raise BadRequest("temperature, top_p, top_k or min_p is out of range")
    longest = len(prompt_ids) + body.max_tokens
    if longest > engine.max_model_len:
        raise BadRequest(
            f"{len(prompt_ids)} prompt and {body.max_tokens} new tokens exceed --max-model-len {engine.max_model_len}"
        )
    stop = [body.stop] if isinstance(body.stop, str) else (body.stop or [])
    if len(stop) > MAX_STOP_STRINGS or any(not word for word in stop):
        raise BadRequest(f"stop takes at most {MAX_STOP_STRINGS} strings, none of them empty")
    stop_ids = set(body.stop_token_ids or ()) | (set() if body.ignore_eos else engine.eos_ids)
    sampling = SamplingParams(body.temperature, body.top_p, max(body.top_k, 0), body.min_p)
    return Request(prompt_ids, body.n, body.max_tokens, sampling, body.seed, stop, stop_ids)


def _prompt_ids(body: GenerateRequest, engine: TransformersEngine) -> list[int]:
    if isinstance(body.prompt, str):
        ids: object = engine.tokenizer.encode(body.prompt).ids
    else:
        ids = body.prompt.get("prompt_token_ids")
    vocabulary = engine.model.config.vocab_size
    if not isinstance(ids, list) or not ids:
        raise BadRequest('prompt must be text or {"prompt_token_ids": [...]}, and not empty')
    if not all(type(i) is int and 0 <= i < vocabulary for i in ids):
        raise BadRequest(f"prompt_token_ids must be whole numbers from 0 to {vocabulary - 1}")
    return ids


def _answer(body: GenerateRequest, request: Request, finished: Finished, engine: TransformersEngine) -> GenerateAnswer:
    sequences = finished.sequences
    logprobs = None
    if body.logprobs is not None:
        logprobs = [
            [[{str(token): logprob}] for token, logprob in zip(s.token_ids, s.logprobs, strict=True)] for s in sequences
        ]
    return GenerateAnswer(
        text=[s.text if s.text is not None else engine.decode(s.token_ids) for s in sequences],
        prompt=body.prompt if isinstance(body.prompt, str) else engine.decode(request.prompt_ids),
        finish_reasons=[s.finish_reason or "length" for s in sequences],
        token_ids=[s.token_ids for s in sequences],
        prompt_token_ids=request.prompt_ids,
        policy_version=finished.policy_version,
        logprobs=logprobs,
        num_tokens=sum(len(s.token_ids) for s in sequences),
        seconds=finished.seconds,
    )


def _json(value: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


def _error(message: str, status: int) -> Response:
    return _json({"error": message}, status)
