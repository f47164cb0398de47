"""Read and write the state of the run: registered trainer, current step, whether it has started."""

from __future__ import annotations

import sqlite3
from uuid import uuid4

import msgspec

from treadle.store import events
from treadle.store.records import RunState
from treadle.wire.hub import RegisterTrainer


def read(db: sqlite3.Connection) -> RunState:
    trainer, current_step, started = db.execute("SELECT trainer, current_step, started FROM run").fetchone()
    (run_id,) = db.execute("SELECT run_id FROM identity").fetchone()
    registration = None if trainer is None else msgspec.json.decode(trainer, type=RegisterTrainer)
    return RunState(trainer=registration, current_step=current_step, started=bool(started), run_id=run_id)


def register_trainer(db: sqlite3.Connection, trainer: RegisterTrainer) -> None:
    """The trainer's word counts: its values replace the earlier ones, and its step may go back.

    It has not begun before it asks for a batch: by then it has published its weights. One that has taken all its steps
    asks for none, and registers after it has published them: environments may evaluate them at once.
    """
    is_done = 0 < trainer.num_steps <= trainer.starting_step
    db.execute(
        "UPDATE run SET trainer = ?, current_step = ?, started = ?",
        (msgspec.json.encode(trainer), trainer.starting_step, is_done),
    )
    events.add(db, "trainer_registered", step=trainer.starting_step, batch_size=trainer.batch_size)


def mark_started(db: sqlite3.Connection) -> None:
    db.execute("UPDATE run SET started = 1")


def begin_life(db: sqlite3.Connection) -> None:
    """Mark the run as not started when a hub starts: environments wait until a trainer asks for a batch."""
    db.execute("UPDATE run SET started = 0")


def reach_step(db: sqlite3.Connection, step: int) -> None:
    """Batches may be acknowledged out of order; only a trainer that registers can go back."""
    db.execute("UPDATE run SET current_step = max(current_step, ?)", (step,))


def latest_step(db: sqlite3.Connection) -> int:
    """The newest step that any batch was made for: no policy can be newer than that."""
    (current,) = db.execute("SELECT current_step FROM run").fetchone()
    (formed,) = db.execute("SELECT max(step) FROM batches").fetchone()
    return int(max(current, formed or 0))


def reset(db: sqlite3.Connection) -> None:
    """Forget everything but the latest example and the events. Group and batch ids are not used again."""
    db.execute(
        "UPDATE run SET (latest_format, latest) = (SELECT format, body FROM payloads ORDER BY id DESC LIMIT 1)"
        " WHERE EXISTS (SELECT 1 FROM payloads)"
    )
    for table in ("groups", "payloads", "batches", "posts", "envs", "lanes", "tally"):
        db.execute(f"DELETE FROM {table}")  # noqa: S608 - names from the line above
    db.execute("UPDATE run SET trainer = NULL, current_step = 0, started = 0")
    db.execute("UPDATE identity SET run_id = ?", (uuid4().hex,))
    events.add(db, "reset")
