"""Which engines the router gets, and when they are taken from it."""

from __future__ import annotations

import pytest

from treadle.config.schema import RouterConfig
from treadle.errors import ConfigError
from treadle.router.process import to_add, to_remove, update_workers
from treadle.router.smg import ID_LABEL, Worker
from treadle.wire.engines import EngineEntry

A, B = "http://a:9001", "http://b:9001"


def entry(engine_id: str, url: str, state: str = "serving") -> EngineEntry:
    return EngineEntry(engine_id=engine_id, name=engine_id, url=url, state=state)  # type: ignore[arg-type]


def worker(engine_id: str, url: str, status: str = "ready") -> Worker:
    return Worker(id=f"worker-{engine_id}", url=url, status=status, labels={ID_LABEL: engine_id})


@pytest.mark.parametrize("state", ["joining", "silent", "out"])
def test_only_engines_that_serve_are_added(state: str) -> None:
    entries = [entry("a1", A), entry("b1", B, state)]
    assert to_add(entries, []) == [entries[0]]
    assert to_add(entries, [worker("a1", A)]) == []


@pytest.mark.parametrize("state", ["joining", "silent", "out"])
def test_engines_that_do_not_serve_any_more_are_removed(state: str) -> None:
    workers = [worker("a1", A), worker("b1", B)]
    assert to_remove([entry("a1", A), entry("b1", B, state)], workers) == [workers[1]]
    assert to_remove([entry("a1", A)], workers) == [workers[1]]
    assert to_remove([], [worker("a1", A, "draining")]) == [], "it is on its way out"


def test_another_start_at_an_address_waits_until_the_former_is_gone() -> None:
    former, again = worker("a1", A), entry("a2", A)
    assert to_remove([again], [former]) == [former]
    assert to_add([again], [former]) == []
    assert to_add([again], [worker("a1", A, "draining")]) == []
    assert to_add([again], []) == [again]


class SmgDouble:
    def __init__(self, workers: list[Worker] | None) -> None:
        self.there = workers
        self.calls: list[tuple[str, str]] = []

    def workers(self) -> list[Worker] | None:
        return self.there

    def add(self, added: EngineEntry) -> None:
        self.calls.append(("add", added.engine_id))

    def remove(self, removed: Worker) -> None:
        self.calls.append(("remove", removed.engine_id))


class TableDouble:
    def __init__(self, entries: list[EngineEntry] | None) -> None:
        self.entries = entries

    def read(self) -> list[EngineEntry] | None:
        return self.entries


def calls(entries: list[EngineEntry] | None, workers: list[Worker] | None) -> list[tuple[str, str]]:
    smg = SmgDouble(workers)
    update_workers(smg, TableDouble(entries))  # type: ignore[arg-type]
    return smg.calls


def test_workers_follow_the_table_and_engines_leave_first() -> None:
    assert calls([entry("a1", A, "out"), entry("b1", B)], [worker("a1", A)]) == [("remove", "a1"), ("add", "b1")]


def test_nothing_changes_while_hub_or_smg_is_away() -> None:
    assert calls(None, [worker("a1", A)]) == []
    assert calls([entry("a1", A)], None) == []


def test_other_machines_need_a_token() -> None:
    RouterConfig().check_access("")
    RouterConfig(host="0.0.0.0").check_access("a-token")
    with pytest.raises(ConfigError, match=r"listens on 0\.0\.0\.0 and needs a token"):
        RouterConfig(host="0.0.0.0").check_access("")
