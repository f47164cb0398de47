"""Fake vLLM server: implements the HTTP routes that the engine uses, with configurable delays."""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
import threading
import time
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from treadle.errors import EngineError
from treadle.net.address import take_port

KEEP_ALIVE_S = 1  # it hangs up on clients that are silent for longer


class FakeVllm:
    """`stop` closes its connections, like the exit of the process."""

    headers = {"Authorization": "Bearer fake"}  # noqa: RUF012 - as the real one has it

    def __init__(self, *, is_ready: bool = True) -> None:
        self.rpc_answers = [None]  # of each worker
        self.rpc_answers_to = {}  # of each worker, to a method of its own
        self.rpcs = []  # (method, arguments)
        self.bodies = []  # of completions
        self.adapters = []
        self.load = {}  # running and waiting sequences, as vLLM's scheduler counts them
        self.refuses_changes = False
        self.adapter_paths = {}  # where it reads each from; one that goes leaves it here
        self.scratch = Path(tempfile.mkdtemp())  # goes with it
        self.may_answer = threading.Event()  # completions wait for it; a streamed one after its first token
        self.may_answer.set()
        self.may_change = threading.Event()  # adapters wait for it
        self.may_change.set()
        self.has_hung_up = threading.Event()  # a client, before it had its answer
        self.is_ready = threading.Event()
        self.has_ended = threading.Event()
        if is_ready:
            self.is_ready.set()
        listener = take_port("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        settings = uvicorn.Config(
            self._app(), log_level="critical", timeout_graceful_shutdown=0, timeout_keep_alive=KEEP_ALIVE_S
        )
        self._http = uvicorn.Server(settings)
        self._thread = threading.Thread(target=self._http.run, kwargs={"sockets": [listener]}, daemon=True)
        self._thread.start()

    @property
    def num_connections(self):
        return len(self._http.server_state.connections)

    def exit_reason(self):
        return "vLLM ended with exit code 1" if self.has_ended.is_set() else None

    def wait_until_ready(self, timeout_s):
        assert self.is_ready.wait(timeout_s)
        if self.has_ended.is_set():
            raise EngineError("ended before it was ready")

    def stop(self):
        self.has_ended.set()
        self.is_ready.set()
        self._http.force_exit = self._http.should_exit = True
        self._thread.join(10)
        shutil.rmtree(self.scratch, ignore_errors=True)

    def _app(self):
        return Starlette(
            routes=[
                Route("/health", self._ok),
                Route("/treadle/load", self._load, methods=["POST"]),
                Route("/treadle/generate", self._complete, methods=["POST"]),
                Route("/v1/load_lora_adapter", self._change, methods=["POST"]),
                Route("/v1/unload_lora_adapter", self._change, methods=["POST"]),
                Route("/treadle/hold", self._hold, methods=["POST"]),
                Route("/treadle/release", self._release, methods=["POST"]),
                Route("/treadle/rpc", self._rpc, methods=["POST"]),
            ]
        )

    async def _ok(self, _):
        return JSONResponse("ok")

    async def _load(self, _):
        return JSONResponse(self.load)

    async def _hold(self, _):
        return JSONResponse({"held_at": time.monotonic()})

    async def _release(self, _):
        return JSONResponse({"released_at": time.monotonic()})

    async def _rpc(self, http):
        body = await http.json()
        self.rpcs.append((body["method"], body["kwargs"]))
        return JSONResponse(self.rpc_answers_to.get(body["method"], self.rpc_answers))

    async def _change(self, http):
        body = await http.json()
        name = body["lora_name"]
        await _until(self.may_change)
        if self.refuses_changes:
            return Response("not now", 500)
        if http.url.path == "/v1/load_lora_adapter":
            self.adapters.append(name)
            self.adapter_paths[name] = Path(body["lora_path"])
        else:
            self.adapters.remove(name)
        return Response("done")

    async def _complete(self, http):
        body = await http.json()
        self.bodies.append(body)
        if body["stream"]:
            return StreamingResponse(self._events(), media_type="application/x-ndjson")
        while not self.may_answer.is_set():
            if await http.is_disconnected():
                self.has_hung_up.set()
                return Response()
            await asyncio.sleep(0.005)
        return JSONResponse({"choices": [_choice(body["sampling"]["max_tokens"], "length")]})

    async def _events(self):
        try:
            yield json.dumps({"choices": [_choice(1, None)]}) + "\n"
            await _until(self.may_answer)
            yield json.dumps({"choices": [_choice(1, "length")]}) + "\n"
        except asyncio.CancelledError:
            self.has_hung_up.set()
            raise


async def _until(event):
    while not event.is_set():
        await asyncio.sleep(0.005)


def _choice(num_tokens, finish_reason):
    return {
        "index": 0, "text": "a" * num_tokens, "token_ids": [7] * num_tokens, "logprobs": [-0.5] * num_tokens,
        "finish_reason": finish_reason,
    }  # fmt: skip
