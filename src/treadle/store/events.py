"""Append and read events. Each is written in the transaction of its change, so neither exists without the other, and a
reader that sends the last id it saw continues exactly there, also after a restart."""

from __future__ import annotations

import sqlite3
import time
from typing import Any

import msgspec

from treadle.store.records import Event

KEPT = 20_000
PRUNE_EVERY = 1_000


def add(db: sqlite3.Connection, kind: str, **data: Any) -> None:
    row = db.execute(
        "INSERT INTO events (at, kind, data) VALUES (?, ?, ?)", (time.time(), kind, msgspec.json.encode(data).decode())
    )
    if row.lastrowid and row.lastrowid % PRUNE_EVERY == 0:
        db.execute("DELETE FROM events WHERE id <= ?", (row.lastrowid - KEPT,))


def after(db: sqlite3.Connection, last_id: int, limit: int) -> list[Event]:
    rows = db.execute("SELECT id, at, kind, data FROM events WHERE id > ? ORDER BY id LIMIT ?", (last_id, limit))
    return [Event(*row) for row in rows]


def newest(db: sqlite3.Connection) -> Event | None:
    row = db.execute("SELECT id, at, kind, data FROM events ORDER BY id DESC LIMIT 1").fetchone()
    return None if row is None else Event(*row)


def time_of(db: sqlite3.Connection, id: int) -> float | None:
    """When event `id` happened; None: it is not kept."""
    row = db.execute("SELECT at FROM events WHERE id = ?", (id,)).fetchone()
    return None if row is None else float(row[0])


def ends(db: sqlite3.Connection) -> tuple[int, int]:
    """Ids of the oldest and of the newest event that is kept; (1, 0) while there is none."""
    # As two questions: either end of the table is then found without reading what lies between.
    oldest, newest = db.execute("SELECT (SELECT min(id) FROM events), (SELECT max(id) FROM events)").fetchone()
    return (1, 0) if newest is None else (oldest, newest)
