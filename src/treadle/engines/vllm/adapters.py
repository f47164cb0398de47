"""Load LoRA adapters into vLLM, track which of them serves the policy, and unload those no longer used.

vLLM gets a new name for every load: it caches results and files by adapter name, and would go on serving the old
adapter under a name that is used again.

vLLM reads an adapter again after it evicted it for others, and exits when the files are gone. A trainer deletes the
files two publishes later, which may be long before the last request that uses them has finished. So vLLM reads from a
private copy, which is kept as long as the adapter is loaded.
"""

from __future__ import annotations

import asyncio
import errno
import secrets
import shutil
import time
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from treadle.engines.interface import Adapter, EngineFacts, check_takes_adapters, find_loaded_adapter
from treadle.engines.model_folder import ADAPTER_FILES, absolute, read_adapter_settings, read_checkpoint_facts
from treadle.engines.vllm.client import VllmClient
from treadle.engines.weight_updates import empty_model
from treadle.errors import EngineError, RequestError, TreadleError
from treadle.log import get_logger

log = get_logger("engine")


@dataclass
class _Entry:
    adapter: Adapter
    served_name: str  # in vLLM
    uses: int = 0  # requests that run with it
    is_retired: bool = False  # unloaded; removed from vLLM when the last request has finished


class AdapterRegistry:
    """Reference-counted adapters by name. Pure."""

    def __init__(self) -> None:
        self._loads = 0
        self._entries: list[_Entry] = []
        self.serving: Adapter | None = None  # serves requests that name no adapter; None: the base model

    def next_name(self, name: str) -> str:
        """A name that vLLM has not seen yet."""
        self._loads += 1
        return f"{name}@{self._loads}"

    def add(self, adapter: Adapter, served_name: str) -> None:
        """An adapter with a policy version serves the policy from now on; its predecessor stays available by name."""
        self._entries.append(_Entry(adapter, served_name))
        if adapter.policy_version is not None:
            self.serving = adapter

    def remove(self, name: str) -> None:
        entry = self._find(name)
        entry.is_retired = True
        if entry.adapter is self.serving:
            self.serving = None

    def served_name(self, name: str) -> str:
        """vLLM's name of the adapter."""
        return self._find(name).served_name

    def acquire(self, name: str | None) -> tuple[Adapter, str] | None:
        """The adapter for a request, and vLLM's name of it; `release` must follow. None: the base model."""
        if name is None and self.serving is None:
            return None
        entry = self._find(name if name is not None else self.serving.name if self.serving else "")
        entry.uses += 1
        return entry.adapter, entry.served_name

    def release(self, served_name: str) -> bool:
        """Whether this was the last use of a retired adapter, which can now be unloaded."""
        for entry in self._entries:
            if entry.served_name == served_name:
                entry.uses -= 1
                return entry.is_retired and not entry.uses
        return False  # the server was restarted meanwhile, with a new registry

    def unused(self) -> list[str]:
        """vLLM's names of retired adapters without running requests."""
        return [entry.served_name for entry in self._entries if entry.is_retired and not entry.uses]

    def discard(self, served_name: str) -> None:
        self._entries = [entry for entry in self._entries if entry.served_name != served_name]

    def loaded(self) -> list[Adapter]:
        return [entry.adapter for entry in self._entries if not entry.is_retired]

    def _find(self, name: str) -> _Entry:
        for entry in self._entries:
            if entry.adapter.name == name and not entry.is_retired:
                return entry
        known = [adapter.name for adapter in self.loaded()]
        raise RequestError(f"no adapter '{name}' is loaded", fix=f"loaded: {', '.join(known) or 'none'}")


class AdapterValidator:
    """Checks that a saved adapter fits the served model.

    vLLM would accept one that does not, and crash later; of one that adapts the output layer it would ignore that part
    (see command.py).
    """

    def __init__(self, folder: Path, facts: EngineFacts) -> None:
        self._folder = folder
        self._facts = facts

    def __call__(self, name: str, path: Path, policy_version: int | None) -> Adapter:
        from treadle.engines.lora import check_adapter, read_adapter

        check_takes_adapters(self._facts)
        path = absolute(path)
        files = read_adapter(path, header_only=True)
        check_adapter(files, empty_model(self._folder), self._folder, self._facts.max_lora_rank or 0)
        modules = {weight.partition(".lora_")[0] for weight in files.shapes}
        others = sorted(module for module in modules if module.rpartition(".")[2] not in self._supported)
        if others:
            raise RequestError(
                f"{path} changes {others[0]}, which vLLM cannot serve beside other requests",
                fix=f"train adapters of the layers only (--lora-target-modules {' '.join(self._supported)})",
            )
        return Adapter(name=name, path=path, rank=files.settings.rank, policy_version=policy_version)

    @cached_property
    def _supported(self) -> tuple[str, ...]:
        return read_checkpoint_facts(self._folder).linear_modules


class AdapterLoader:
    """Loads adapters into one vLLM server process, and unloads them."""

    def __init__(self, client: VllmClient, validate: AdapterValidator, scratch: Path) -> None:
        """`scratch`: a folder that is deleted with the server process."""
        self._client = client
        self._validate = validate
        self._scratch = scratch
        self._copies: dict[str, Path] = {}  # by vLLM's adapter names
        self.registry = AdapterRegistry()

    async def load(self, name: str, path: Path, policy_version: int | None) -> Adapter:
        known = find_loaded_adapter(self.registry.loaded(), name, absolute(path), policy_version)
        if known is not None:
            return known  # a retried request
        started = time.monotonic()
        adapter, copy = await asyncio.to_thread(self._checked_copy, name, path, policy_version)
        served_name, copied = self.registry.next_name(adapter.name), time.monotonic()
        try:
            await self._client.call("/v1/load_lora_adapter", {"lora_name": served_name, "lora_path": str(copy)})
        except BaseException:
            shutil.rmtree(copy, ignore_errors=True)
            raise
        self._copies[served_name] = copy
        self.registry.add(adapter, served_name)
        now = time.monotonic()
        log.info("adapter_loaded", name=served_name, seconds=now - started, vllm_s=now - copied)
        return adapter

    async def unload_unused(self) -> None:
        """Unload retired adapters; one that vLLM fails to unload is retried at the next call."""
        failures = []
        for served_name in self.registry.unused():
            try:
                await self._client.call("/v1/unload_lora_adapter", {"lora_name": served_name})
            except EngineError as error:
                failures.append(error)
                continue
            except RequestError as error:  # it does not know this name
                failures.append(error)
            self.registry.discard(served_name)
            shutil.rmtree(self._copies.pop(served_name), ignore_errors=True)
        if failures:
            raise failures[0]

    def _checked_copy(self, name: str, path: Path, policy_version: int | None) -> tuple[Adapter, Path]:
        adapter = self._validate(name, path, policy_version)
        copy = self._scratch / f"adapter-{secrets.token_hex(8)}"
        try:
            copy.mkdir()
            for file in ADAPTER_FILES:
                shutil.copyfile(adapter.path / file, copy / file)
            read_adapter_settings(copy)  # vLLM reads this copy, which may differ from the files that were checked
        except BaseException as error:
            shutil.rmtree(copy, ignore_errors=True)
            if isinstance(error, OSError):
                raise self._copy_error(adapter.path, error) from None
            raise
        return adapter, copy

    def _copy_error(self, adapter: Path, error: OSError) -> TreadleError:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return EngineError(
                f"{self._scratch} has no room for a copy of the adapter {adapter}",
                fix="free some space there, or set TMPDIR to a folder on another disk",
            )
        exit_reason = self._client.exit_reason()  # the scratch folder is deleted with the server
        if exit_reason is not None:
            return EngineError(exit_reason, fix="POST /bridge/restart, or start the engine again")
        return RequestError(f"the adapter {adapter} cannot be copied: {error}", fix="save it again, and keep it there")
