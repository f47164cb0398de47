"""Inside vLLM's API process: routes that we do not use are closed, and six of ours are added.

    POST /treadle/generate {"prompt_ids": [...], ...}       completions: see generating.py
    POST /treadle/hold     {"mode": "keep", ...}            no token is sampled from here on, and no GPU computes one
    POST /treadle/release  {"has_new_weights": true, ...}   go on; with new weights, what was cached is dropped first
    POST /treadle/adopt    {"gate": ..., "number": ...}     stand still at the gate until a trainer has written, go on
    POST /treadle/rpc      {"method": ..., "kwargs": {...}}      one of our worker's methods (worker.py)
    POST /treadle/adapter  {"name": ..., "policy_version": 4}     fingerprints of an adapter

vLLM is asked through its engine client's own methods (but see _pause), and its list of models for adapters. Every call
needs the key, also those that vLLM would let pass.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import os
import time
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from treadle.engines.vllm.completions import GENERATE
from treadle.engines.vllm.generating import failure_of, generate
from treadle.sync.gate import PublishGate, wait_for_trainer

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

PASSED_ON = {
    ("GET", "/health"),
    ("POST", "/v1/load_lora_adapter"),
    ("POST", "/v1/unload_lora_adapter"),
}
WORKER_METHODS = {
    "treadle_layout",
    "treadle_begin_fingerprints",
    "treadle_read_fingerprints",
    "treadle_load_weights",
    "treadle_join",
    "treadle_receive",
}
_TURNS_TO_SEND = 4  # of the event loop
_TO_BE_SENT_S = 0.2  # for a message to be in the engine's hands
_TURNS_TO_FLUSH = 32  # of the event loop: from a token's arrival here to its being sent takes a handful


class TreadleRoutes:
    """ASGI middleware, named to vLLM by --middleware."""

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        self._app = app
        self._expected = f"Bearer {os.environ['VLLM_API_KEY']}".encode()
        self._own = {
            "/treadle/hold": _hold,
            "/treadle/release": _release,
            "/treadle/adopt": _adopt,
            "/treadle/rpc": _rpc,
            "/treadle/adapter": _adapter,
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
        elif route in PASSED_ON:
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
        except Exception as error:  # vLLM's errors have no common base; the engine's client must hear of each
            return _error(500, f"{type(error).__name__}: {error}")


_Handler = Callable[[Any, dict[str, Any]], Awaitable[Any]]


async def _generate(scope: Scope, receive: Receive) -> Response:
    try:
        return await generate(scope, receive)
    except Exception as error:  # as in _answer
        return _error(*failure_of(error))


async def _hold(state: Any, body: dict[str, Any]) -> dict[str, float]:
    client = state.engine_client
    await _pause(client, body["mode"])
    held_at = time.monotonic()
    if body["settles"]:
        await client.collective_rpc("treadle_settle")
    # What was sampled before is on its way to clients now, and must not seem to come after the hold.
    for _ in range(_TURNS_TO_FLUSH):
        await asyncio.sleep(0)
    return {"held_at": held_at}  # one clock for all processes of a machine


async def _pause(client: Any, mode: str) -> None:
    """vLLM's own method sleeps 20 ms after the work is done, for the flush that _hold sees to in less than one."""
    core = getattr(client, "engine_core", None)
    at_once = getattr(core, "pause_scheduler_async", None)
    if at_once is None:
        await client.pause_generation(mode=mode, clear_cache=False)
    else:
        await at_once(mode=mode, clear_cache=False)


async def _release(state: Any, body: dict[str, Any]) -> dict[str, float]:
    client = state.engine_client
    if body["has_new_weights"]:
        # Requests that were frozen are computed again from their tokens, under the new weights.
        await client.reset_prefix_cache(reset_running_requests=True)
    if not body["stay_held"]:
        await client.resume_generation()
    return {"released_at": time.monotonic()}


async def _adopt(state: Any, body: dict[str, Any]) -> Any:
    """Both calls are sent before either is answered. vLLM takes them in this order, and takes all that has come before
    it computes on; the worker goes on only when the second is sent. So no token is computed in between: under new
    weights, with what was cached under the old ones.

    A turn of a busy event loop takes milliseconds, in which the worker would stand still. Each call is sent in its
    first turn; what is to happen soon after them happens in the same one.
    """
    client, order = state.engine_client, {"gate": body["gate"], "number": body["number"]}
    drop, num_turns = _drop_caches(client)
    gate = PublishGate(Path(body["gate"]))
    standing = asyncio.ensure_future(client.collective_rpc("treadle_stand_still", kwargs=order))
    dropping = asyncio.ensure_future(drop)
    for _ in range(num_turns):
        await asyncio.sleep(0)
    asyncio.get_running_loop().call_soon(gate.allow_resume, body["number"])
    if not await wait_for_trainer(standing, gate, body["number"], body["timeout_s"]):
        # the weights may be half written: vLLM must not compute on, once the worker waits no longer
        pausing = asyncio.ensure_future(_pause(client, "keep"))
        await asyncio.sleep(_TO_BE_SENT_S)
        gate.abandon(body["number"])
        await asyncio.gather(standing, dropping, pausing)
        raise TimeoutError("the trainer did not finish writing the weights")
    await dropping
    return await standing


def _drop_caches(client: Any) -> tuple[Awaitable[Any], int]:
    """The call, and how many turns it may take until it is sent: vLLM's own (0.32) asks all its engines in tasks of
    their own. There is one engine here, and it can be asked at once."""
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


def _error(status: int, message: str) -> Response:
    return JSONResponse({"error": {"message": message}}, status)
