"""Choose the database of a queue by the settings of its hub: a SQLite file, or PostgreSQL (`store`)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from treadle.background import awake_s
from treadle.config.schema import HubConfig
from treadle.errors import ConfigError, MissingExtra
from treadle.net.address import shown_store
from treadle.store.browse import Browser
from treadle.store.file import refuse_locked, set_aside
from treadle.store.sqlite import SqliteStore
from treadle.store.store import Store
from treadle.watch.waits import Waits
from treadle.wire.hub import RegisterTrainer

RUN_FILE = "hub.sqlite"  # the queue in the folder of a run


def shown_queue(config: HubConfig) -> str:
    """Where the queue is, without a password."""
    return shown_store(config.store) if config.store else str(config.database)


def open_store(config: HubConfig, waits: Waits, on_failure: Callable[[], None]) -> Store:
    """`on_failure` is called when nothing can be stored any more; a PostgreSQL server is waited for instead."""
    if config.store:
        store: Store = _postgres().PostgresStore.open(config.store, waits=waits, fresh=config.fresh)
        return store
    if config.fresh:
        set_aside(config.database)
    return SqliteStore.open(config.database, clock=awake_s, waits=waits, on_failure=on_failure)


def check_store(config: HubConfig) -> None:
    """Refuse a file that another process has open, or a PostgreSQL database that cannot be used."""
    if config.store:
        _postgres().check(config.store)
    else:
        refuse_locked(config.database)


def queue_file(config: HubConfig, folder: Path) -> Path | None:
    """The SQLite file of a run in `folder`, which may have moved with it; None where there is none."""
    moved = folder / RUN_FILE
    file = moved if moved.is_file() else config.database
    return None if config.store or not file.is_file() else file


def open_recorded(config: HubConfig, folder: Path) -> Browser:
    """The groups of a run, also while its hub runs; ConfigError when its queue is not in reach."""
    if config.store:
        browser: Browser = _postgres().open_browser(config.store)
        return browser
    file = queue_file(config, folder)
    if file is None:
        raise ConfigError(f"the queue of this run is gone: {config.database}", fix="restore it")
    return Browser.open(file)


def recorded_trainer(config: HubConfig) -> RegisterTrainer | None:
    """The trainer whose queue is in the PostgreSQL database; None where there is none."""
    trainer: RegisterTrainer | None = _postgres().recorded_trainer(config.store)
    return trainer


def _postgres() -> ModuleType:
    try:
        from treadle.store import postgres
    except ImportError as error:
        raise MissingExtra(
            "a queue in PostgreSQL (--store) needs psycopg 3, which is not installed or finds no libpq",
            fix='pip install "treadle[postgres]"',
        ) from error
    return postgres
