"""Register and read environments. Ids count from 0 and are never reused; a name belongs to one id."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from treadle.store import events
from treadle.store.records import EnvRecord
from treadle.wire.hub import RegisterEnv

_COLUMNS = (
    "env_id, name, desired_name, weight, group_size, max_token_length, min_batch_allocation, connected, groups_accepted"
)


def register(
    db: sqlite3.Connection,
    env: RegisterEnv,
    *,
    resume: bool,
    idle_s: Callable[[int], float],
    gone_after_s: float,
) -> EnvRecord:
    """A new name, or the old one back for an environment that was here before.

    Example: `gsm8k` becomes `gsm8k_0`, a second one beside it `gsm8k_1`. When the process behind `gsm8k_0`
    has not been seen for `gone_after_s`, or the newcomer says that it resumes, it is `gsm8k_0` again, with
    its count.
    """
    desired_name = env.desired_name or "env"
    namesakes = [row for row in read_all(db) if row.desired_name == desired_name]
    returning = max(namesakes, key=lambda row: idle_s(row.env_id), default=None)
    if returning is not None and (resume or idle_s(returning.env_id) > gone_after_s):
        env_id, name = returning.env_id, returning.name
    else:
        env_id = count(db)
        name = _unused_name(db, desired_name, len(namesakes))
    db.execute(
        "INSERT INTO envs (env_id, name, desired_name, weight, group_size, max_token_length,"
        " min_batch_allocation) VALUES (?, ?, ?, ?, ?, ?, ?)"
        " ON CONFLICT (env_id) DO UPDATE SET connected = 1, weight = excluded.weight,"
        " group_size = excluded.group_size, max_token_length = excluded.max_token_length,"
        " min_batch_allocation = excluded.min_batch_allocation",
        (env_id, name, desired_name, 1.0 if env.weight is None else env.weight, env.group_size,
         env.max_token_length, env.min_batch_allocation),
    )  # fmt: skip
    events.add(db, "env_registered", env_id=env_id, name=name)
    registered = read(db, env_id)
    assert registered is not None  # noqa: S101 - inserted above
    return registered


def disconnect(db: sqlite3.Connection, env_id: int) -> bool:
    """False when there is no such environment. What it posted stays."""
    found = db.execute("UPDATE envs SET connected = 0 WHERE env_id = ?", (env_id,)).rowcount > 0
    if found:
        events.add(db, "env_disconnected", env_id=env_id)
    return found


def count(db: sqlite3.Connection) -> int:
    """Ids are the numbers below this."""
    (num_envs,) = db.execute("SELECT count(*) FROM envs").fetchone()
    return int(num_envs)


def read(db: sqlite3.Connection, env_id: int) -> EnvRecord | None:
    row = db.execute(f"SELECT {_COLUMNS} FROM envs WHERE env_id = ?", (env_id,)).fetchone()  # noqa: S608
    return None if row is None else _record(row)


def read_all(db: sqlite3.Connection) -> list[EnvRecord]:
    rows = db.execute(f"SELECT {_COLUMNS} FROM envs ORDER BY env_id")  # noqa: S608
    return [_record(row) for row in rows]


def _record(row: tuple[Any, ...]) -> EnvRecord:
    record = EnvRecord(*row)
    return replace(record, connected=bool(record.connected))  # SQLite has no booleans


def _unused_name(db: sqlite3.Connection, desired_name: str, k: int) -> str:
    """Count on when the name is taken: an environment may have asked to be called `a_1` itself."""
    taken = {name for (name,) in db.execute("SELECT name FROM envs")}
    while f"{desired_name}_{k}" in taken:
        k += 1
    return f"{desired_name}_{k}"
