"""ASGI middleware inside vLLM's API process: blocks unused routes and adds seven of Treadle's.

    POST /treadle/generate {"prompt_ids": [...], ...}           token ids in, ids and logprobs out (completions.py)
    POST /treadle/hold     {"mode": "keep", ...}                stop sampling; returns when no GPU work is pending
    POST /treadle/release  {"has_new_weights": true, ...}       resume; with new weights, caches are dropped first
    POST /treadle/adopt    {"gate": ..., "number": ...}         wait at the gate for the trainer's write, then resume
    POST /treadle/rpc      {"method": ..., "kwargs": {...}}     call a worker method (worker.py)
    POST /treadle/adapter  {"name": ..., "policy_version": 4}   fingerprints of an adapter
    POST /treadle/load     {}                                   running and waiting sequences, KV cache usage

vLLM is called through public methods of its engine client (except in _pause), and its model list for adapters. Every
request needs the API key, also on routes that vLLM would leave open.

Why an own generate route: vLLM's detokenizes each token as it comes and builds a dictionary of its logprobs. That is
most of the work of this process, and everything else (a pause, an adapter, new requests) waits behind it. This route
keeps numbers, and detokenizes only where text must be known while it grows: for stop strings, and in streams.
"""

from __future__ import annotations

import asyncio
import hmac
import itertools
import json
import logging
import math
import os
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, MutableMapping
from contextlib import aclosing
from pathlib import Path
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from treadle.engines.vllm.command import KEY_VARIABLE, MODEL_NAME
from treadle.engines.vllm.completions import GENERATE, LOAD, VllmChoice, VllmOutput, VllmRequest, decode_request
from treadle.net.server import json_answer, unless_gone
from treadle.sync.gate import PublishGate, wait_for_trainer

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]

MIN_LOGPROB = -9999.0  # replaces -inf, which JSON cannot express; vLLM's own routes do the same
_NO_ANSWER = "vLLM ended a request without an answer"
_DEAD_ENGINE_ERROR = "EngineDeadError"
log = logging.getLogger("vllm.treadle")  # in vLLM's log
_request_ids = itertools.count()
Scope = MutableMapping[str, Any]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
ALLOWED_ROUTES = {
    ("GET", "/health"),
    ("POST", "/v1/load_lora_adapter"),
    ("POST", "/v1/unload_lora_adapter"),
}
WORKER_METHODS = {
    "treadle_layout",
    "treadle_shards",
    "treadle_begin_fingerprints",
    "treadle_read_fingerprints",
    "treadle_load_weights",
    "treadle_join",
    "treadle_receive",
}
_GAUGES: dict[str, tuple[str, type[int] | type[float]]] = {  # vLLM's metric -> field of VllmLoad
    "vllm:num_requests_running": ("num_running", int),
    "vllm:num_requests_waiting": ("num_waiting", int),
    "vllm:kv_cache_usage_perc": ("kv_cache_usage", float),
}
_TURNS_TO_SEND = 4  # turns of the event loop until a call is sent
_SEND_S = 0.2  # time until a call has reached vLLM's engine process
_TURNS_TO_FLUSH = 32  # turns of the event loop; a token needs a handful from its arrival here until it is sent
_Handler = Callable[[Any, dict[str, Any]], Awaitable[Any]]


async def _generate(scope: Scope, receive: Receive) -> Response:
    try:
        http = Request(scope, receive)
        order = decode_request(await http.body())
        answers = _answers(scope["app"].state, order)
        # A request is rejected before its first output, so a stream starts only when that is there.
        first = await unless_gone(http, _first(answers) if order.stream else _whole(answers))
    except Exception as error:  # vLLM's errors have no common base class; all are reported to the client
        return _error(*describe_error(error))
    if first is None:
        return Response()
    if order.stream:
        return StreamingResponse(_lines(first, answers), media_type="application/x-ndjson")
    return json_answer(first)


def describe_error(error: Exception) -> tuple[int, str]:
    """HTTP status and message of an error; server errors are logged to vLLM's log too.

    vLLM wraps unexpected errors into one without a message. It reports an invalid request by a ValueError (0.26) or by
    an exception class of its own (0.32).
    """
    from vllm import exceptions

    at_fault = (ValueError, getattr(exceptions, "VLLMClientError", ValueError))
    for found in (error, error.__cause__):
        if isinstance(found, at_fault):
            return 400, str(found)
    found = error.__cause__ or error
    if type(found).__name__ != _DEAD_ENGINE_ERROR:  # that one is reported by every request
        log.error("a completion failed", exc_info=found)
    return 500, f"{type(found).__name__}: {found}".rstrip(": ")


async def _answers(state: Any, order: VllmRequest) -> AsyncGenerator[VllmOutput, None]:
    from vllm.inputs import tokens_input
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    kind = RequestOutputKind.DELTA if order.stream else RequestOutputKind.FINAL_ONLY
    params = SamplingParams(**order.sampling, flat_logprobs=True, output_kind=kind)
    adapter = None
    if order.model != MODEL_NAME:
        adapter = state.openai_serving_models.lora_requests.get(order.model)
        if adapter is None:
            raise ValueError(f"no adapter {order.model} is loaded")
    outputs = state.engine_client.generate(
        tokens_input(order.prompt_ids, cache_salt=order.cache_salt),
        params,
        f"treadle-{next(_request_ids)}",
        lora_request=adapter,
        priority=order.priority,
    )
    async with aclosing(outputs):
        async for output in outputs:
            yield to_output(output, has_text=params.detokenize, num_top=params.logprobs or 0)


async def _first(answers: AsyncGenerator[VllmOutput, None]) -> VllmOutput:
    async for answer in answers:
        return answer
    raise RuntimeError(_NO_ANSWER)


async def _whole(answers: AsyncGenerator[VllmOutput, None]) -> VllmOutput:
    last = None
    async for answer in answers:  # there is one; iterate to the end, because closing the generator aborts the request
        last = answer
    if last is None:
        raise RuntimeError(_NO_ANSWER)
    return last


async def _lines(first: VllmOutput, others: AsyncGenerator[VllmOutput, None]) -> AsyncIterator[bytes]:
    async with aclosing(others):
        yield msgspec.json.encode(first) + b"\n"
        try:
            async for answer in others:
                yield msgspec.json.encode(answer) + b"\n"
        except Exception as error:  # vLLM's errors have no common base class; the HTTP status has been sent already
            yield msgspec.json.encode({"error": describe_error(error)[1]}) + b"\n"


def to_output(output: Any, *, has_text: bool, num_top: int) -> VllmOutput:
    """`output`: vLLM's RequestOutput with flat logprobs."""
    prompt = output.prompt_logprobs
    return VllmOutput(
        choices=[_choice(completion, has_text=has_text, num_top=num_top) for completion in output.outputs],
        prompt_tops=None if prompt is None else [_entries(prompt, *span) for span in _spans(prompt)],
    )


def _choice(completion: Any, *, has_text: bool, num_top: int) -> VllmChoice:
    if completion.finish_reason == "error":
        raise RuntimeError("vLLM's engine could not finish a completion")
    flat, num_new = completion.logprobs, len(completion.token_ids)
    spans = _spans(flat)[-num_new:] if num_new else []  # 0.26 repeats earlier ones if there is no new token
    return VllmChoice(
        index=completion.index,
        token_ids=list(completion.token_ids),
        logprobs=[_number(flat.logprobs[start]) for start, _ in spans],
        # The sampled token comes first at each position. If it is a top token it is listed again, except where vLLM has
        # joined two outputs of a stream.
        tops=[_entries(flat, start + (end - start > num_top), end) for start, end in spans] if num_top else [],
        text=completion.text if has_text else None,
        finish_reason=completion.finish_reason,
    )


def _spans(flat: Any) -> list[tuple[int, int]]:
    return list(zip(flat.start_indices, flat.end_indices, strict=True))


def _entries(flat: Any, start: int, end: int) -> dict[int, float]:
    return dict(zip(flat.token_ids[start:end], map(_number, flat.logprobs[start:end]), strict=True))


def _number(logprob: float) -> float:
    """A logprob that JSON can express.

    >>> _number(-0.5), _number(float("-inf"))
    (-0.5, -9999.0)
    """
    if math.isnan(logprob):
        raise RuntimeError("vLLM's logprobs are not numbers: the model's weights may have diverged")
    return max(logprob, MIN_LOGPROB)


class TreadleRoutes:
    """ASGI middleware, named to vLLM by --middleware."""

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        self._app = app
        self._expected = f"Bearer {os.environ[KEY_VARIABLE]}".encode()
        self._own = {
            "/treadle/hold": _hold,
            "/treadle/release": _release,
            "/treadle/adopt": _adopt,
            "/treadle/rpc": _rpc,
            "/treadle/adapter": _adapter,
            LOAD: _load,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":  # a web socket
            await send({"type": "websocket.close", "code": 1008})
            return
        given = dict(scope["headers"]).get(b"authorization", b"")
        route = (scope["method"], scope["path"])
        if not hmac.compare_digest(given, self._expected):
            await _error(401, "this server answers only the engine that started it")(scope, receive, send)
        elif route in ALLOWED_ROUTES:
            await self._app(scope, receive, send)
        elif route == ("POST", GENERATE):
            answer = await _generate(scope, receive)
            await answer(scope, receive, send)
        elif route[0] == "POST" and route[1] in self._own:
            answer = await self._answer(self._own[route[1]], scope, receive)
            await answer(scope, receive, send)
        else:
            await _error(404, "this route is closed")(scope, receive, send)

    async def _answer(self, handler: _Handler, scope: Scope, receive: Receive) -> Response:
        try:
            body = json.loads(await Request(scope, receive).body() or b"{}")
            return JSONResponse(await handler(scope["app"].state, body))
        except Exception as error:  # as in _generate
            return _error(500, f"{type(error).__name__}: {error}")


async def _hold(state: Any, body: dict[str, Any]) -> dict[str, float]:
    client = state.engine_client
    if body["mode"] == "abort":
        await _pause(client, "keep")  # pending tokens (output_batching.py) are sent before the abort
    await _pause(client, body["mode"])
    held_at = time.monotonic()
    if body["synchronize"]:
        await client.collective_rpc("treadle_synchronize")
    # Tokens sampled before the hold are being sent to clients, and must not seem to come after it.
    for _ in range(_TURNS_TO_FLUSH):
        await asyncio.sleep(0)
    return {"held_at": held_at}  # the monotonic clock is the same for all processes of a machine


async def _pause(client: Any, mode: str) -> None:
    """vLLM's own method sleeps 20 ms for a flush that _hold does in less than one."""
    core = getattr(client, "engine_core", None)
    at_once = getattr(core, "pause_scheduler_async", None)
    if at_once is None:
        await client.pause_generation(mode=mode, clear_cache=False)
    else:
        await at_once(mode=mode, clear_cache=False)


async def _release(state: Any, body: dict[str, Any]) -> dict[str, float]:
    client = state.engine_client
    if body["has_new_weights"]:
        # Frozen requests are recomputed from their tokens under the new weights.
        await client.reset_prefix_cache(reset_running_requests=True)
    if not body["stay_held"]:
        await client.resume_generation()
    return {"released_at": time.monotonic()}


async def _adopt(state: Any, body: dict[str, Any]) -> Any:
    """Hold the worker at the gate while the trainer writes, and drop the caches before the next token.

    Both calls are sent before either is answered. vLLM handles them in this order, and handles everything received
    before it computes the next step; the worker continues only when the second call is sent. So no token is computed in
    between, under new weights but with keys and values of the old ones.

    A turn of a busy event loop takes milliseconds, in which the worker would stand idle. Each call is sent in its first
    turn, and what must follow soon happens in the same one.
    """
    client, order = state.engine_client, {"gate": body["gate"], "number": body["number"]}
    drop, num_turns = _drop_caches(client)
    gate = PublishGate(Path(body["gate"]))
    waiting = asyncio.ensure_future(client.collective_rpc("treadle_wait_for_write", kwargs=order))
    dropping = asyncio.ensure_future(drop)
    for _ in range(num_turns):
        await asyncio.sleep(0)
    asyncio.get_running_loop().call_soon(gate.allow_resume, body["number"])
    if not await wait_for_trainer(waiting, gate, body["number"], body["timeout_s"]):
        # The weights may be half written: vLLM must not compute when the worker stops waiting.
        pausing = asyncio.ensure_future(_pause(client, "keep"))
        await asyncio.sleep(_SEND_S)
        gate.abandon(body["number"])
        await asyncio.gather(waiting, dropping, pausing)
        raise TimeoutError("the trainer did not finish writing the weights")
    await dropping
    return await waiting


def _drop_caches(client: Any) -> tuple[Awaitable[Any], int]:
    """The call, and the turns of the event loop until it is sent.

    vLLM's own method (0.32) calls each of its engines in a separate task. There is one engine here, which can be called
    directly.
    """
    core = getattr(client, "engine_core", None)
    at_once = getattr(core, "call_utility_async", None)
    if at_once is None:
        return client.reset_prefix_cache(reset_running_requests=True), _TURNS_TO_SEND
    reset_running_requests, reset_connector = True, False
    return at_once("reset_prefix_cache", reset_running_requests, reset_connector), 0


async def _rpc(state: Any, body: dict[str, Any]) -> Any:
    client = state.engine_client
    if body["method"] not in WORKER_METHODS:
        raise ValueError(f"{body['method']} is none of our worker's methods")
    return await client.collective_rpc(body["method"], kwargs=body["kwargs"])


async def _adapter(state: Any, body: dict[str, Any]) -> Any:
    number = state.openai_serving_models.lora_requests[body["name"]].lora_int_id
    kwargs = {"adapter_id": number, "policy_version": body["policy_version"]}
    return await state.engine_client.collective_rpc("treadle_adapter_fingerprints", kwargs=kwargs)


async def _load(state: Any, _: dict[str, Any]) -> dict[str, float]:
    """By vLLM's own gauges, which it updates with every step; reading them takes 0.2 ms."""
    from prometheus_client import REGISTRY

    await state.engine_client.check_health()  # raises if the engine process has died
    load = {}
    for gauge in REGISTRY.restricted_registry(list(_GAUGES)).collect():
        name, kind = _GAUGES[gauge.name]
        load[name] = kind(sum(sample.value for sample in gauge.samples))
    return load


def _error(status: int, message: str) -> Response:
    return JSONResponse({"error": {"message": message}}, status)
