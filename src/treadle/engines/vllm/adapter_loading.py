"""Adapters into and out of one life of vLLM's server, as the book of them says."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from treadle.engines.port import Adapter
from treadle.engines.vllm.adapters import AdapterBook, CheckAdapter
from treadle.engines.vllm.client import VllmClient
from treadle.engines.vllm.model_facts import absolute
from treadle.log import get_logger

log = get_logger("engine")


class AdapterLoading:
    def __init__(self, client: VllmClient, check: CheckAdapter) -> None:
        self._client = client
        self._check = check
        self.book = AdapterBook()

    async def check_and_load(self, name: str, path: Path, policy_version: int | None) -> Adapter:
        known = self.book.known(name, absolute(path), policy_version)
        if known is not None:
            return known  # the same call came twice
        adapter = await asyncio.to_thread(self._check, name, path, policy_version)
        await self.load(adapter)
        return adapter

    async def load(self, adapter: Adapter) -> None:
        served_name = self.book.new_name(adapter.name)
        started = time.monotonic()
        await self._client.call("/v1/load_lora_adapter", {"lora_name": served_name, "lora_path": str(adapter.path)})
        self.book.add(adapter, served_name)
        log.info("adapter_loaded", name=served_name, seconds=time.monotonic() - started)

    async def unload_unused(self) -> None:
        for served_name in self.book.take_unused():
            await self._client.call("/v1/unload_lora_adapter", {"lora_name": served_name})
