"""/bridge/* and /reload_weights: let a trainer pause the engine, update its weights, and verify them."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from treadle.engines.api.context import ApiContext
from treadle.engines.api.http import NotFound, decode, resolve_adapter_folder, resolve_weights_folder, route
from treadle.net.bodies import json_answer
from treadle.wire.bridge import (
    Adopt,
    AskFingerprints,
    BridgeInfo,
    BridgeState,
    Fingerprints,
    Joined,
    JoinGroup,
    Pause,
    ReceiveWeights,
    ReloadWeights,
    RestartEngine,
    Resume,
    Updated,
)

NOT_SUPPORTED = {"status": "not_supported"}


class BridgeRoutes:
    def __init__(self, context: ApiContext) -> None:
        self._context = context
        self._engine = context.engine

    def routes(self) -> list[Route]:
        reads = {
            "/bridge/info": self.info,
            "/bridge/state_dict_info": self.state_dict_info,
            "/bridge/is_paused": self.is_paused,
            "/bridge/is_sleeping": self.is_sleeping,
            "/bridge/debug": self.debug,
        }
        changes = {
            "/bridge/pause": self.pause,
            "/bridge/resume": self.resume,
            "/bridge/adopt": self.adopt,
            "/bridge/sleep": self.not_supported,
            "/bridge/wake_up": self.not_supported,
            "/bridge/fingerprints": self.fingerprints,
            "/bridge/join": self.join,
            "/bridge/receive": self.receive,
            "/bridge/restart": self.restart,
            "/reload_weights": self.reload_weights,
        }
        stats = self._context.stats
        return [
            *(route(path, handler, stats) for path, handler in reads.items()),
            *(route(path, handler, stats, method="POST") for path, handler in changes.items()),
        ]

    async def pause(self, http: HttpRequest) -> Response:
        body = await decode(http, Pause)
        with self._context.publishers.authorize(http, allow_anonymous=True):
            await self._engine.hold(body.mode, self._context.pause_timeout_s)
        return self._now("paused")

    async def resume(self, http: HttpRequest) -> Response:
        body = await decode(http, Resume)
        with self._context.publishers.authorize(http, allow_anonymous=body.policy_version is None):
            held_s = await self._engine.release(body.policy_version)
        if body.policy_version is not None:
            self._context.stats.weights_changed()
        return self._now("resumed", held_s)

    async def adopt(self, http: HttpRequest) -> Response:
        order = await decode(http, Adopt)
        with self._context.publishers.authorize(http):
            held_s = await self._engine.adopt(order)
        self._context.stats.weights_changed()
        return self._now("adopted", held_s)

    async def is_paused(self, _: HttpRequest) -> Response:
        return json_answer({"is_paused": (await self._engine.status()).is_held})

    async def is_sleeping(self, _: HttpRequest) -> Response:
        return json_answer({"is_sleeping": False})

    async def not_supported(self, _: HttpRequest) -> Response:
        """Weights are never moved off the device: a trainer may share them."""
        return json_answer(NOT_SUPPORTED)

    async def info(self, _: HttpRequest) -> Response:
        facts, state = self._engine.facts, await self._engine.status()
        return json_answer(
            BridgeInfo(
                enabled=True,
                shared_weights=await self._engine.layout() is not None,
                update_count=state.policy_version,
                last_update_time=self._context.stats.last_update_time,
                model_name=str(facts.folder),
                device=facts.device,
                engine=facts.kind,
                engine_version=facts.version,
                dtype=facts.dtype,
                is_paused=state.is_held,
                has_lora=facts.has_lora,
                max_lora_rank=facts.max_lora_rank,
                quantization=facts.quantization,
                max_model_len=facts.max_model_len,
                max_num_seqs=facts.max_num_seqs,
                logprobs_mode=facts.logprobs_mode,
                adapter_root=str(self._context.adapter_root),
            )
        )

    async def state_dict_info(self, _: HttpRequest) -> Response:
        layout = await self._engine.layout()
        if layout is None:
            raise NotFound("this engine was started without --weights-file")
        state = await self._engine.status()
        now = {"policy_version": state.policy_version, "is_held": state.is_held}
        return json_answer(msgspec.structs.replace(layout, **now))

    async def fingerprints(self, http: HttpRequest) -> Response:
        body = await decode(http, AskFingerprints)
        found = await self._engine.fingerprints(body.policy_version, body.adapter)
        return json_answer(Fingerprints(policy_version=body.policy_version, fingerprints=dict(found)))

    async def join(self, http: HttpRequest) -> Response:
        body = await decode(http, JoinGroup)
        with self._context.publishers.authorize(http):
            await self._engine.join(body)
        return json_answer(Joined(status="joined"))

    async def receive(self, http: HttpRequest) -> Response:
        body = await decode(http, ReceiveWeights)
        with self._context.publishers.authorize(http):
            return json_answer(await self._engine.receive(body))

    async def reload_weights(self, http: HttpRequest) -> Response:
        body, started = await decode(http, ReloadWeights), time.monotonic()
        path = str(self._context.model_folder) if body.path is None else body.path
        folder = await asyncio.to_thread(self._folder, path)
        with self._context.publishers.authorize(http):
            held_s = await self._engine.reload(folder, body.policy_version)
        return await self._updated(started, held_s)

    async def restart(self, http: HttpRequest) -> Response:
        body, started = await decode(http, RestartEngine), time.monotonic()
        root, path = self._context.adapter_root, body.adapter_path
        adapter = None if path is None else resolve_adapter_folder(path, root)
        folder = await asyncio.to_thread(self._folder, body.model_path)
        with self._context.publishers.authorize(http, allow_anonymous=True):
            await self._engine.restart(folder, adapter, body.policy_version)
        self._context.publishers.reset(http)
        await self._context.write_bridge_file()  # the addresses have changed
        return await self._updated(started)

    async def debug(self, _: HttpRequest) -> Response:
        adapters = [msgspec.to_builtins(adapter, enc_hook=str) for adapter in self._engine.adapters()]
        facts = msgspec.to_builtins(self._engine.facts, enc_hook=str)
        state = msgspec.to_builtins(await self._engine.status())
        return json_answer({"facts": facts, "state": state, "adapters": adapters})

    def _folder(self, path: str) -> Path:
        return resolve_weights_folder(path, self._context.adapter_root, self._context.model_folder)

    def _now(self, status: str, held_s: float = 0.0) -> Response:
        return json_answer(BridgeState(status=status, policy_version=self._engine.policy_version, held_s=held_s))

    async def _updated(self, started: float, held_s: float = 0.0) -> Response:
        self._context.stats.weights_changed()
        version, seconds = (await self._engine.status()).policy_version, time.monotonic() - started
        return json_answer(Updated(status="ok", policy_version=version, seconds=seconds, held_s=held_s))
