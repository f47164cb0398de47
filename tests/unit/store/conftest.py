from __future__ import annotations

import contextlib
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import pytest

from tests.postgres_server import rows_of
from treadle.hub.batching import plan
from treadle.store import LeaseTerms, SqliteStore, Store
from treadle.store.postgres import PostgresStore
from treadle.wire.hub import RegisterTrainer


class HandClock:
    """A monotonic clock that a test moves by hand."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


@pytest.fixture
def terms() -> LeaseTerms:
    return LeaseTerms(lease_s=60.0, max_deliveries=3, plan=plan, is_alive=lambda _: True)


@pytest.fixture
def trainer() -> RegisterTrainer:
    return RegisterTrainer(
        wandb_group="g",
        wandb_project="p",
        batch_size=4,
        max_token_len=128,
        checkpoint_dir="ckpt",
        save_checkpoint_interval=5,
        starting_step=0,
        num_steps=10,
    )


class Queue(Protocol):
    """A place that a store can be opened at again, and its tables as they are."""

    def open(self, *, clock: Callable[[], float] | None = None) -> Store: ...

    def rows(self, sql: str) -> list[tuple]: ...


class SqliteQueue:
    def __init__(self, path: Path) -> None:
        self._path = path

    def open(self, *, clock: Callable[[], float] | None = None) -> Store:
        return SqliteStore.open(self._path, clock=clock or time.monotonic)

    def rows(self, sql: str) -> list[tuple]:
        with contextlib.closing(sqlite3.connect(self._path, isolation_level=None)) as db:
            return db.execute(sql).fetchall()


class PostgresQueue:
    def __init__(self, url: str) -> None:
        self.url = url

    def open(self, *, clock: Callable[[], float] | None = None) -> Store:
        return PostgresStore.open(self.url, clock=clock)

    def rows(self, sql: str) -> list[tuple]:
        return rows_of(self.url, sql)


@pytest.fixture(params=["sqlite", "postgres"])
def queue(request: pytest.FixtureRequest, tmp_path: Path) -> Queue:
    """A test that uses it states what holds for every store."""
    if request.param == "sqlite":
        return SqliteQueue(tmp_path / "hub.sqlite")
    return PostgresQueue(request.getfixturevalue("postgres").new_database())


@pytest.fixture
def store(queue: Queue, clock: HandClock) -> Iterator[Store]:
    with queue.open(clock=clock) as opened:
        yield opened
