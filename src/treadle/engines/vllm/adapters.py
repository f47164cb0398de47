"""Which LoRA adapters are loaded, which of them serves the policy, and which can go. Pure.

vLLM gets a new name for every load: it keeps what it computed, and what it read, by name, and would go on serving the
old adapter under a name that is used again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from treadle.engines.port import Adapter, EngineFacts, find_loaded
from treadle.engines.vllm.model_facts import absolute, empty_model, read_model_facts
from treadle.errors import EngineError, RequestError

CheckAdapter = Callable[[str, Path, int | None], Adapter]


@dataclass
class _Entry:
    adapter: Adapter
    served_name: str  # in vLLM
    uses: int = 0  # requests that run with it
    is_retired: bool = False  # it was unloaded, and goes when the last of them has finished


class AdapterBook:
    def __init__(self) -> None:
        self._loads = 0
        self._entries: list[_Entry] = []
        self.serving: Adapter | None = None  # what requests that name no adapter get; None: the base model

    def new_name(self, name: str) -> str:
        """A name that vLLM has not heard yet."""
        self._loads += 1
        return f"{name}@{self._loads}"

    def add(self, adapter: Adapter, served_name: str) -> None:
        """With a policy version, it serves the policy from here on; its predecessor can still be asked for by name."""
        self._entries.append(_Entry(adapter, served_name))
        if adapter.policy_version is not None:
            self.serving = adapter

    def known(self, name: str, path: Path, policy_version: int | None) -> Adapter | None:
        """The very adapter, if it is loaded: a call that is repeated, because its answer was lost, changes nothing."""
        return find_loaded(self.listed(), name, path, policy_version)

    def remove(self, name: str) -> None:
        entry = self._find(name)
        entry.is_retired = True
        if entry.adapter is self.serving:
            self.serving = None

    def served_name(self, name: str) -> str:
        """In vLLM."""
        return self._find(name).served_name

    def borrow(self, name: str | None) -> tuple[Adapter, str] | None:
        """The adapter for a request, and vLLM's name for it; to be given back. None: the base model."""
        if name is None and self.serving is None:
            return None
        entry = self._find(name if name is not None else self.serving.name if self.serving else "")
        entry.uses += 1
        return entry.adapter, entry.served_name

    def give_back(self, served_name: str) -> bool:
        """Whether that was the last use of an adapter that can go now."""
        for entry in self._entries:
            if entry.served_name == served_name:
                entry.uses -= 1
                return entry.is_retired and not entry.uses
        return False  # the server was restarted meanwhile, and with it the book

    def unused(self) -> list[str]:
        """vLLM's names of the adapters that nobody will ask for again."""
        return [entry.served_name for entry in self._entries if entry.is_retired and not entry.uses]

    def forget(self, served_name: str) -> None:
        self._entries = [entry for entry in self._entries if entry.served_name != served_name]

    def listed(self) -> list[Adapter]:
        return [entry.adapter for entry in self._entries if not entry.is_retired]

    def _find(self, name: str) -> _Entry:
        for entry in self._entries:
            if entry.adapter.name == name and not entry.is_retired:
                return entry
        known = [adapter.name for adapter in self.listed()]
        raise RequestError(f"no adapter '{name}' is loaded", fix=f"loaded: {', '.join(known) or 'none'}")


class AdapterCheck:
    """Whether a saved adapter fits the model that is served. vLLM would take one that does not, and die of it later; of
    one that changes the output it would leave that part out (command.py)."""

    def __init__(self, folder: Path, max_rank: int) -> None:
        self._folder = folder
        self._max_rank = max_rank

    def __call__(self, name: str, path: Path, policy_version: int | None) -> Adapter:
        from treadle.engines.lora import check_adapter, read_adapter_head

        path = absolute(path)
        files = read_adapter_head(path)
        check_adapter(files, empty_model(self._folder), self._folder, self._max_rank)
        self._refuse_output(path, {weight.partition(".lora_")[0] for weight in files.shapes})
        return Adapter(name=name, path=path, rank=files.rank, policy_version=policy_version)

    @cached_property
    def _taken(self) -> tuple[str, ...]:
        return read_model_facts(self._folder).linear_modules

    def _refuse_output(self, path: Path, modules: set[str]) -> None:
        taken = self._taken
        others = sorted(module for module in modules if module.rpartition(".")[2] not in taken)
        if others:
            raise RequestError(
                f"{path} changes {others[0]}, which vLLM cannot serve beside other requests",
                fix=f"train adapters of the layers only (--lora-target-modules {' '.join(taken)})",
            )


def check_for(folder: Path, facts: EngineFacts) -> CheckAdapter:
    """Of adapters that are to serve with the model in `folder`."""
    if facts.max_lora_rank is None:
        return _refuse_adapters
    return AdapterCheck(folder, facts.max_lora_rank)


def _refuse_adapters(_name: str, _path: Path, _policy_version: int | None) -> Adapter:
    raise EngineError("this engine takes no adapters", fix="start it with --enable-lora")
