"""Adapters into and out of one life of vLLM's server, as the book of them says.

vLLM reads an adapter again when it has had to let go of it for others, and ends when its files are gone. A trainer
deletes them when it has published two more, which may be long before the last request under it is through. So vLLM
reads from a copy of ours, and that stays for as long as the adapter does.
"""

from __future__ import annotations

import asyncio
import secrets
import shutil
import time
from pathlib import Path

from treadle.engines.port import ADAPTER_FILES, Adapter
from treadle.engines.vllm.adapters import AdapterBook, CheckAdapter
from treadle.engines.vllm.client import VllmClient
from treadle.engines.vllm.model_facts import absolute
from treadle.errors import EngineError
from treadle.log import get_logger

log = get_logger("engine")


class AdapterLoading:
    def __init__(self, client: VllmClient, check: CheckAdapter, scratch: Path) -> None:
        """`scratch`: a folder that goes with the server."""
        self._client = client
        self._check = check
        self._scratch = scratch
        self._copies: dict[str, Path] = {}  # by vLLM's names of the adapters
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
        copy = await asyncio.to_thread(_copied, adapter.path, self._scratch)
        try:
            await self._client.call("/v1/load_lora_adapter", {"lora_name": served_name, "lora_path": str(copy)})
        except BaseException:
            shutil.rmtree(copy, ignore_errors=True)
            raise
        self._copies[served_name] = copy
        self.book.add(adapter, served_name)
        log.info("adapter_loaded", name=served_name, seconds=time.monotonic() - started)

    async def unload_unused(self) -> None:
        for served_name in self.book.take_unused():
            await self._client.call("/v1/unload_lora_adapter", {"lora_name": served_name})
            shutil.rmtree(self._copies.pop(served_name), ignore_errors=True)


def _copied(adapter: Path, scratch: Path) -> Path:
    copy = scratch / f"adapter-{secrets.token_hex(8)}"
    try:
        copy.mkdir()
        for name in ADAPTER_FILES:
            shutil.copyfile(adapter / name, copy / name)
    except OSError as error:
        shutil.rmtree(copy, ignore_errors=True)
        raise EngineError(
            f"the adapter {adapter} could not be copied to {scratch}: {error.strerror}",
            fix="free some space there, or set TMPDIR to a folder on another disk",
        ) from None
    return copy
