"""/lora/*: load, unload and list LoRA adapters while serving; also vLLM's /v1/load_lora_adapter."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from treadle.engines.adapter_settings import AdapterSettings, read_adapter_settings
from treadle.engines.api.context import ApiContext
from treadle.engines.api.http import NotFound, decode, resolve_adapter_folder, route
from treadle.errors import EngineError, RequestError
from treadle.log import get_logger
from treadle.net.bodies import json_answer
from treadle.wire.bridge import LoadAdapter, LoadedAdapter, UnloadAdapter

log = get_logger("engine")
MAX_NAME_CHARS = 200


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
        body, started = await decode(http, LoadAdapter), time.monotonic()
        path = self._folder(body.adapter_path)
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
                adapter_config=_config_answer(settings),
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
        if not self._engine.facts.has_lora:
            raise EngineError("this engine takes no adapters", fix="start it with --enable-lora")
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


def _config_answer(settings: AdapterSettings) -> dict[str, object]:
    return {
        "r": settings.rank,
        "lora_alpha": settings.alpha,
        "target_modules": settings.target_modules,
        "base_model": settings.base_model or None,
    }
