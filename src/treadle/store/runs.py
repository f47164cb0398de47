"""The run's own state: which trainer is registered, at which step it is, whether it has begun."""

from __future__ import annotations

import sqlite3

import msgspec

from treadle.store.records import RunState
from treadle.wire.hub import RegisterTrainer


def read(db: sqlite3.Connection) -> RunState:
    trainer, current_step, started = db.execute("SELECT trainer, current_step, started FROM run").fetchone()
    registration = None if trainer is None else msgspec.json.decode(trainer, type=RegisterTrainer)
    return RunState(trainer=registration, current_step=current_step, started=bool(started))


def register_trainer(db: sqlite3.Connection, trainer: RegisterTrainer) -> None:
    """The trainer's word counts: its values replace the earlier ones, and its step may go back.

    It has not begun before it asks for a batch: by then it has published its weights.
    """
    db.execute(
        "UPDATE run SET trainer = ?, current_step = ?, started = 0",
        (msgspec.json.encode(trainer), trainer.starting_step),
    )


def mark_started(db: sqlite3.Connection) -> None:
    db.execute("UPDATE run SET started = 1")


def begin_life(db: sqlite3.Connection) -> None:
    """A hub that starts knows of no trainer at work: environments wait until one asks for a batch again."""
    db.execute("UPDATE run SET started = 0")


def set_step(db: sqlite3.Connection, step: int) -> None:
    db.execute("UPDATE run SET current_step = ?", (step,))


def reset(db: sqlite3.Connection) -> None:
    """Forget everything. Group and batch ids are not used again."""
    for table in ("groups", "batches", "posts", "envs", "tally"):
        db.execute(f"DELETE FROM {table}")  # noqa: S608 - names from the line above
    db.execute("UPDATE run SET trainer = NULL, current_step = 0, started = 0")
