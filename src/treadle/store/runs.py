"""Read and write the run, its environments and its events in the database.

Environment ids count from 0 and are never reused; a name belongs to one id. An event is written in the transaction of
its change, so neither exists without the other. A reader that sends the last id it saw continues exactly there, also
after a restart.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any
from uuid import uuid4

import msgspec

from treadle.store.connection import Connection
from treadle.store.records import EnvRecord, Event, RunState
from treadle.wire.hub import RegisterEnv, RegisterTrainer

EVENTS_KEPT = 20_000
PRUNE_EVENTS_EVERY = 1_000
RECENT_EVENTS = 1_000  # registrations that another hub has not reported yet are among these
_ENV_COLUMNS = (
    "env_id, name, desired_name, weight, group_size, max_token_length, min_batch_allocation, groups_accepted, connected"
)

# ---- run


def read_run(db: Connection) -> RunState:
    trainer, current_step, started = db.execute("SELECT trainer, current_step, started FROM run").fetchone()
    (run_id,) = db.execute("SELECT run_id FROM identity").fetchone()
    registration = None if trainer is None else msgspec.json.decode(trainer, type=RegisterTrainer)
    return RunState(trainer=registration, current_step=current_step, started=bool(started), run_id=run_id)


def register_trainer(db: Connection, trainer: RegisterTrainer) -> None:
    """The trainer's word counts: its values replace the earlier ones, and its step may go back.

    It has not begun before it asks for a batch: by then it has published its weights. One that has taken all its steps
    asks for none, and registers after it has published them: environments may evaluate them at once.
    """
    is_done = 0 < trainer.num_steps <= trainer.starting_step
    db.execute(
        "UPDATE run SET trainer = ?, current_step = ?, started = ?",
        (msgspec.json.encode(trainer), trainer.starting_step, int(is_done)),
    )
    add_event(db, "trainer_registered", step=trainer.starting_step, batch_size=trainer.batch_size)


def set_started(db: Connection, started: bool) -> None:
    """False when a hub starts: environments wait until a trainer asks for a batch."""
    db.execute("UPDATE run SET started = ?", (int(started),))


def admission_facts(db: Connection) -> tuple[RunState, int, int]:
    """What posts are checked against: the run, the number of environments, the newest step that has a batch."""
    run = read_run(db)
    num_envs, formed = db.execute("SELECT (SELECT count(*) FROM envs), (SELECT max(step) FROM batches)").fetchone()
    return run, num_envs, max(run.current_step, formed or 0)


def reset(db: Connection) -> None:
    """Forget everything but the latest example and the events. Group and batch ids are not used again."""
    db.execute(
        "UPDATE run SET (latest_format, latest) = (SELECT format, body FROM payloads ORDER BY id DESC LIMIT 1)"
        " WHERE EXISTS (SELECT 1 FROM payloads)"
    )
    for table in ("groups", "payloads", "batches", "posts", "envs", "env_queues", "tally"):
        db.execute(f"DELETE FROM {table}")  # noqa: S608 - names from the line above
    db.execute("UPDATE run SET trainer = NULL, current_step = 0, started = 0")
    db.execute("UPDATE identity SET run_id = ?", (uuid4().hex,))
    add_event(db, "reset")


# ---- environments


def register_env(
    db: Connection,
    env: RegisterEnv,
    *,
    resume: bool,
    idle_s: Callable[[int], float],
    gone_after_s: float,
    has_other_hubs: bool = False,
) -> EnvRecord:
    """A new name, or the old one back for an environment that was here before.

    Example: `gsm8k` becomes `gsm8k_0`, a second one beside it `gsm8k_1`. When the process behind `gsm8k_0`
    has not been seen for `gone_after_s`, or the newcomer says that it resumes, it is `gsm8k_0` again, with
    its count. One that has just registered at another hub is not gone, although `idle_s` does not know of it yet.
    """
    desired_name = env.desired_name or "env"
    namesakes = _read_envs(db, "WHERE desired_name = ?", desired_name)
    recent = _registered_after(db, time.time() - gone_after_s) if has_other_hubs and namesakes else frozenset()
    idle = {row.env_id: 0.0 if row.env_id in recent else idle_s(row.env_id) for row in namesakes}
    returning = max(namesakes, key=lambda row: idle[row.env_id], default=None)
    if returning is not None and (resume or idle[returning.env_id] > gone_after_s):
        env_id, name = returning.env_id, returning.name
    else:
        (env_id,) = db.execute("SELECT count(*) FROM envs").fetchone()  # ids are 0, 1, 2, ...
        number = len(namesakes)
        # An environment may have asked for the name `a_1` itself.
        while _read_envs(db, "WHERE name = ?", name := f"{desired_name}_{number}"):
            number += 1
    db.execute(
        "INSERT INTO envs (env_id, name, desired_name, weight, group_size, max_token_length,"
        " min_batch_allocation) VALUES (?, ?, ?, ?, ?, ?, ?)"
        " ON CONFLICT (env_id) DO UPDATE SET connected = 1, weight = excluded.weight,"
        " group_size = excluded.group_size, max_token_length = excluded.max_token_length,"
        " min_batch_allocation = excluded.min_batch_allocation",
        (env_id, name, desired_name, 1.0 if env.weight is None else env.weight, env.group_size,
         env.max_token_length, env.min_batch_allocation),
    )  # fmt: skip
    add_event(db, "env_registered", env_id=env_id, name=name)
    registered = read_env(db, env_id)
    assert registered is not None  # noqa: S101 - inserted above
    return registered


def _registered_after(db: Connection, at: float) -> frozenset[int]:
    rows = db.execute(
        "SELECT data FROM events WHERE kind = 'env_registered' AND at > ? AND id > (SELECT max(id) FROM events) - ?",
        (at, RECENT_EVENTS),
    )
    return frozenset(msgspec.json.decode(data)["env_id"] for (data,) in rows)


def disconnect_env(db: Connection, env_id: int) -> bool:
    """False when there is no such environment. What it posted stays."""
    found = db.execute("UPDATE envs SET connected = 0 WHERE env_id = ?", (env_id,)).rowcount > 0
    if found:
        add_event(db, "env_disconnected", env_id=env_id)
    return found


def read_env(db: Connection, env_id: int) -> EnvRecord | None:
    return next(iter(_read_envs(db, "WHERE env_id = ?", env_id)), None)


def read_envs(db: Connection) -> list[EnvRecord]:
    return _read_envs(db)


def _read_envs(db: Connection, condition: str = "", *parameters: Any) -> list[EnvRecord]:
    rows = db.execute(f"SELECT {_ENV_COLUMNS} FROM envs {condition} ORDER BY env_id", parameters)  # noqa: S608
    return [EnvRecord(*(*row[:-1], bool(row[-1]))) for row in rows]  # stored as 0 or 1


# ---- events


def add_event(db: Connection, kind: str, **data: Any) -> None:
    (event_id,) = db.execute(
        "INSERT INTO events (at, kind, data) VALUES (?, ?, ?) RETURNING id",
        (time.time(), kind, msgspec.json.encode(data).decode()),
    ).fetchone()
    if event_id % PRUNE_EVENTS_EVERY == 0:
        db.execute("DELETE FROM events WHERE id <= ?", (event_id - EVENTS_KEPT,))


def events_after(db: Connection, last_id: int, limit: int) -> list[Event]:
    rows = db.execute("SELECT id, at, kind, data FROM events WHERE id > ? ORDER BY id LIMIT ?", (last_id, limit))
    return [Event(*row) for row in rows]


def event_ends(db: Connection) -> tuple[int, int]:
    """Ids of the oldest and of the newest event that is kept; (1, 0) while there is none."""
    # Two subqueries: only the two ends of the table are read.
    oldest, newest = db.execute("SELECT (SELECT min(id) FROM events), (SELECT max(id) FROM events)").fetchone()
    return (1, 0) if newest is None else (oldest, newest)
