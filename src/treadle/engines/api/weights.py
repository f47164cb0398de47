"""Routes that change what the engine serves.

/bridge/*, /reload_weights    let a trainer pause the engine, send files, update its weights, and verify them
/lora/*                       load, unload and list LoRA adapters while serving; also vLLM's /v1/load_lora_adapter
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from treadle.engines.api.context import (
    ApiContext,
    Handler,
    NotFound,
    decode,
    resolve_adapter_folder,
    resolve_weights_folder,
    route,
)
from treadle.engines.api.received_files import read_part
from treadle.engines.interface import HOLD_TIMEOUT_S, check_takes_adapters
from treadle.engines.model_folder import read_adapter_settings
from treadle.errors import RequestError
from treadle.log import get_logger
from treadle.net.server import json_answer
from treadle.wire.bridge import (
    Adopt,
    AskFingerprints,
    BridgeInfo,
    BridgeState,
    Fingerprints,
    Joined,
    JoinGroup,
    LoadAdapter,
    LoadedAdapter,
    Pause,
    ReceivedPart,
    ReceiveWeights,
    ReloadWeights,
    RestartEngine,
    Resume,
    UnloadAdapter,
    Updated,
)

NOT_SUPPORTED = {"status": "not_supported"}
MAX_NAME_CHARS = 200
log = get_logger("engine")


class BridgeRoutes:
    def __init__(self, context: ApiContext) -> None:
        self._context = context
        self._engine = context.engine
        self._resuming: asyncio.Task[None] | None = None  # the end of a pause that the trainer limited

    def routes(self) -> list[Route]:
        reads = {
            "/bridge/info": self.info,
            "/bridge/state_dict_info": self.state_dict_info,
            "/bridge/shards": self.shards,
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
        files = "/bridge/files/{folder}/{name}"  # a transfer does not end a limited pause
        stats = self._context.stats
        return [
            *(route(path, handler, stats) for path, handler in reads.items()),
            *(route(path, self._ending_pause(handler), stats, method="POST") for path, handler in changes.items()),
            route(files, self.receive_file, stats, method="POST"),
        ]

    def _ending_pause(self, handler: Handler) -> Handler:
        """Every change of the engine's state replaces the end of a limited pause."""

        async def change(http: HttpRequest) -> Response:
            if self._resuming is not None:
                self._resuming.cancel()
                self._resuming = None
            return await handler(http)

        return change

    async def pause(self, http: HttpRequest) -> Response:
        body = await decode(http, Pause)
        with self._context.publishers.authorize(http, allow_anonymous=True):
            await self._engine.hold(body.mode, HOLD_TIMEOUT_S)
        if body.at_most_s is not None:
            self._resuming = asyncio.create_task(self._resume_after(body.at_most_s))
        return self._now("paused")

    async def _resume_after(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        self._resuming = None
        log.warning("pause_ended", reason="nobody resumed the engine", seconds=seconds)
        await self._engine.release(None)

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
                adapter_root=str(self._context.adapter_root),
                num_workers=facts.num_workers,
                engine_id=self._context.engine_id,
            )
        )

    async def shards(self, _: HttpRequest) -> Response:
        return json_answer(await self._engine.shards())

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
        path, context = str(self._context.model_folder) if body.path is None else body.path, self._context
        if body.files:
            with context.publishers.authorize(http):
                async with context.received.taken(path, body.files) as folder:
                    held_s = await self._engine.reload(folder, body.policy_version)
            return await self._updated(started, held_s)
        folder = await asyncio.to_thread(resolve_weights_folder, path, context.adapter_root, context.model_folder)
        with context.publishers.authorize(http):
            held_s = await self._engine.reload(folder, body.policy_version)
        return await self._updated(started, held_s)

    async def receive_file(self, http: HttpRequest) -> Response:
        """A part of a file of a published version; `files` of /reload_weights and /lora/load name what was sent."""
        part = read_part(http.path_params["folder"], http.path_params["name"], http.query_params)
        with self._context.publishers.authorize(http):
            data = bytearray()
            async for chunk in http.stream():
                data += chunk
                part.check_length(len(data))
            num_bytes = await asyncio.to_thread(self._context.received.write, part, data)
        return json_answer(ReceivedPart(num_bytes=num_bytes))

    async def restart(self, http: HttpRequest) -> Response:
        body, started = await decode(http, RestartEngine), time.monotonic()
        root, path = self._context.adapter_root, body.adapter_path
        adapter = None if path is None else resolve_adapter_folder(path, root)
        folder = await asyncio.to_thread(resolve_weights_folder, body.model_path, root, self._context.model_folder)
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

    def _now(self, status: str, held_s: float = 0.0) -> Response:
        return json_answer(BridgeState(status=status, policy_version=self._engine.policy_version, held_s=held_s))

    async def _updated(self, started: float, held_s: float = 0.0) -> Response:
        self._context.stats.weights_changed()
        version, seconds = (await self._engine.status()).policy_version, time.monotonic() - started
        return json_answer(Updated(status="ok", policy_version=version, seconds=seconds, held_s=held_s))


# ---- adapters


class LoadByName(msgspec.Struct, kw_only=True):
    """Body of vLLM's POST /v1/load_lora_adapter."""

    lora_name: str
    lora_path: str


class UnloadByName(msgspec.Struct, kw_only=True):
    """Body of vLLM's POST /v1/unload_lora_adapter."""

    lora_name: str
    lora_int_id: int | None = None


class AdapterRoutes:
    def __init__(self, context: ApiContext) -> None:
        self._context = context
        self._engine = context.engine
        self._highest = 0  # largest version that an adapter was loaded with

    def routes(self) -> list[Route]:
        changes = {
            "/lora/load": self.load,
            "/lora/unload": self.unload,
            "/v1/load_lora_adapter": self.load_by_name,
            "/v1/unload_lora_adapter": self.unload_by_name,
        }
        stats = self._context.stats
        return [
            route("/lora/status", self.status, stats),
            *(route(path, handler, stats, method="POST") for path, handler in changes.items()),
        ]

    async def status(self, _: HttpRequest) -> Response:
        facts, stats, active = self._engine.facts, self._context.stats, self._engine.serving_adapter
        adapters = self._engine.adapters()
        return json_answer(
            {
                "lora_available": facts.has_lora,
                "max_lora_rank": facts.max_lora_rank,
                "active_adapter_path": None if active is None else str(active.path),
                "active_adapter_name": None if active is None else active.name,
                "active_adapter_id": None if active is None else stats.adapter_ids.get(active.name),
                "load_count": stats.num_adapter_loads,
                "available_adapters": [str(adapter.path) for adapter in adapters],
                "adapters": [msgspec.to_builtins(adapter, enc_hook=str) for adapter in adapters],
            }
        )

    async def load(self, http: HttpRequest) -> Response:
        body, context = await decode(http, LoadAdapter), self._context
        if not body.files:
            return await self._load(http, body, self._folder(body.adapter_path))
        check_takes_adapters(self._engine.facts)
        with context.publishers.authorize(http):
            async with context.received.taken(body.adapter_path, body.files) as path:
                return await self._load(http, body, path)

    async def _load(self, http: HttpRequest, body: LoadAdapter, path: Path) -> Response:
        started = time.monotonic()
        settings = await asyncio.to_thread(read_adapter_settings, path)
        name = self._new_name(body.adapter_name or path.name)
        with self._context.publishers.authorize(http):
            adapter = await self._engine.load_adapter(name, path, self._version_of(name, body.policy_version))
        number = self._context.stats.adapter_loaded(name)
        self._context.stats.weights_changed()
        return json_answer(
            LoadedAdapter(
                status="ok",
                adapter_path=str(adapter.path),
                adapter_name=name,
                adapter_id=number,
                load_count=self._context.stats.num_adapter_loads,
                adapter_config={
                    "r": settings.rank,
                    "lora_alpha": settings.alpha,
                    "target_modules": settings.target_modules,
                    "base_model": settings.base_model or None,
                },
                policy_version=(await self._engine.status()).policy_version,
                seconds=time.monotonic() - started,
            )
        )

    async def unload(self, http: HttpRequest) -> Response:
        body = await decode(http, UnloadAdapter)
        active = self._engine.serving_adapter
        name = body.adapter_name or (active.name if active else None)
        if name is None:
            return json_answer({"status": "ok", "previous_adapter": None, "previous_name": None})
        with self._context.publishers.authorize(http, allow_anonymous=not self._serves_policy(name)):
            path = await self._unload(name)
        return json_answer({"status": "ok", "previous_adapter": str(path), "previous_name": name})

    async def load_by_name(self, http: HttpRequest) -> Response:
        body = await decode(http, LoadByName)
        name = self._new_name(body.lora_name)
        await self._engine.load_adapter(name, self._folder(body.lora_path), None)
        self._context.stats.adapter_loaded(name)
        return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")

    async def unload_by_name(self, http: HttpRequest) -> Response:
        body = await decode(http, UnloadByName)
        with self._context.publishers.authorize(http, allow_anonymous=not self._serves_policy(body.lora_name)):
            await self._unload(body.lora_name)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    def _serves_policy(self, name: str) -> bool:
        serving = self._engine.serving_adapter
        return serving is not None and serving.name == name

    def _folder(self, path: str) -> Path:
        check_takes_adapters(self._engine.facts)
        return resolve_adapter_folder(path, self._context.adapter_root)

    def _version_of(self, name: str, requested: int | None) -> int:
        """Without a version, as in requests of Atropos' trainers: a new one, or the present one of a repeated load."""
        serving = self._engine.serving_adapter
        if requested is None and serving is not None and serving.name == name and serving.policy_version is not None:
            return serving.policy_version
        if requested is None and any(adapter.name == name for adapter in self._engine.adapters()):
            raise RequestError(f"the adapter '{name}' is loaded already, and does not serve", fix="choose a new name")
        version = max(self._highest, self._engine.policy_version) + 1 if requested is None else requested
        self._highest = max(self._highest, version)
        if requested is None:
            log.warning("adapter_without_version", name=name, serves_as=version)
        return version

    async def _unload(self, name: str) -> Path:
        known = {adapter.name: adapter for adapter in self._engine.adapters()}
        if name not in known:
            raise NotFound(f"there is no adapter '{name}'", fix="GET /lora/status lists what is loaded")
        await self._engine.unload_adapter(name)
        self._context.stats.adapter_ids.pop(name, None)
        return known[name].path

    def _new_name(self, name: str) -> str:
        """Check that requests can name this adapter as their model."""
        folder = self._engine.facts.folder
        if not name or len(name) > MAX_NAME_CHARS or name in (self._context.model_name, str(folder), folder.name):
            raise RequestError(f"an adapter cannot be called '{name[:60]}'", fix="choose another name")
        return name
