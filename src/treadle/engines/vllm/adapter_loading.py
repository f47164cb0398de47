"""Adapters into and out of one life of vLLM's server, as the book of them says.

vLLM reads an adapter again when it has had to let go of it for others, and ends when its files are gone. A trainer
deletes them when it has published two more, which may be long before the last request under it is through. So vLLM
reads from a copy of ours, and that stays for as long as the adapter does.
"""

from __future__ import annotations

import asyncio
import errno
import secrets
import shutil
import time
from pathlib import Path

from treadle.engines.adapter_settings import read_adapter_settings
from treadle.engines.port import ADAPTER_FILES, Adapter
from treadle.engines.vllm.adapters import AdapterBook, CheckAdapter
from treadle.engines.vllm.client import VllmClient
from treadle.engines.vllm.model_facts import absolute
from treadle.errors import EngineError, RequestError, TreadleError
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
        started = time.monotonic()
        adapter, copy = await asyncio.to_thread(self._checked_copy, name, path, policy_version)
        await self._hand_over(adapter, copy, started)
        return adapter

    async def load(self, adapter: Adapter) -> None:
        """One that was checked before."""
        started = time.monotonic()
        await self._hand_over(adapter, await asyncio.to_thread(self._copy, adapter), started)

    async def _hand_over(self, adapter: Adapter, copy: Path, started: float) -> None:
        served_name, copied = self.book.new_name(adapter.name), time.monotonic()
        try:
            await self._client.call("/v1/load_lora_adapter", {"lora_name": served_name, "lora_path": str(copy)})
        except BaseException:
            shutil.rmtree(copy, ignore_errors=True)
            raise
        self._copies[served_name] = copy
        self.book.add(adapter, served_name)
        now = time.monotonic()
        log.info("adapter_loaded", name=served_name, seconds=now - started, vllm_s=now - copied)

    async def unload_unused(self) -> None:
        """One that vLLM does not let go of now is tried again with the next."""
        failures = []
        for served_name in self.book.unused():
            try:
                await self._client.call("/v1/unload_lora_adapter", {"lora_name": served_name})
            except EngineError as error:
                failures.append(error)
                continue
            except RequestError as error:  # it does not know this name
                failures.append(error)
            self.book.forget(served_name)
            shutil.rmtree(self._copies.pop(served_name), ignore_errors=True)
        if failures:
            raise failures[0]

    def _checked_copy(self, name: str, path: Path, policy_version: int | None) -> tuple[Adapter, Path]:
        adapter = self._check(name, path, policy_version)
        return adapter, self._copy(adapter)

    def _copy(self, adapter: Adapter) -> Path:
        try:
            return _copied(adapter.path, self._scratch)
        except OSError as error:
            raise self._no_copy(adapter.path, error) from None

    def _no_copy(self, adapter: Path, error: OSError) -> TreadleError:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return EngineError(
                f"{self._scratch} has no room for a copy of the adapter {adapter}",
                fix="free some space there, or set TMPDIR to a folder on another disk",
            )
        death = self._client.death()  # its folder goes with it
        if death is not None:
            return EngineError(death, fix="POST /bridge/restart, or start the engine again")
        return RequestError(f"the adapter {adapter} cannot be copied: {error}", fix="save it again, and keep it there")


def _copied(adapter: Path, scratch: Path) -> Path:
    copy = scratch / f"adapter-{secrets.token_hex(8)}"
    copy.mkdir()
    try:
        for name in ADAPTER_FILES:
            shutil.copyfile(adapter / name, copy / name)
        read_adapter_settings(copy)  # what vLLM reads is this copy, and it may differ from what was checked
    except BaseException:
        shutil.rmtree(copy, ignore_errors=True)
        raise
    return copy
