"""Batches in the database: a record for each optimizer step, and who holds it.

A record says which groups a step is made of, in which order. It is committed before the batch is first given
out and never changes, so a trainer that resumes from an older checkpoint repeats its steps on the very same
data. The lease (holder, token, deadline) is beside it: taking or losing one changes nothing about the record.
"""

from __future__ import annotations

import json
import secrets
import sqlite3
import time
from dataclasses import dataclass

from treadle.store import groups, runs
from treadle.store.records import Batch, LeaseTerms
from treadle.store.refusals import HeldByAnother, StaleToken


@dataclass(frozen=True, slots=True)
class Moment:
    """Now, on the clock of this process. Deadlines on an earlier process' clock count as passed."""

    process: str
    now_s: float


@dataclass(frozen=True, slots=True)
class _Record:
    id: int
    step: int
    state: str
    group_ids: str
    deliveries: int
    token: str | None
    holder: str | None
    process: str | None
    deadline_s: float | None

    def is_held(self, moment: Moment) -> bool:
        on_our_clock = self.holder is not None and self.process == moment.process
        return on_our_clock and self.deadline_s is not None and self.deadline_s > moment.now_s


def lease(db: sqlite3.Connection, step: int, holder: str, terms: LeaseTerms, moment: Moment) -> Batch | None:
    """The recorded batch of `step`, or a new one; None when no exact batch can be formed now."""
    state = runs.read(db)
    if state.trainer is None:
        return None
    if not state.started:
        runs.mark_started(db)
    record = _find(db, step)
    if record is not None and record.holder != holder and record.is_held(moment):
        raise HeldByAnother(f"step {step} is leased by '{record.holder}'")
    if record is not None and record.state == "open" and record.deliveries >= terms.max_deliveries:
        _bury(db, record, f"delivered {record.deliveries} times and never acknowledged")
        record = None
    if record is None:
        record = _form(db, step, state.trainer.batch_size, terms)
    if record is None:
        return None
    token = secrets.token_hex(16)
    db.execute(
        "UPDATE batches SET deliveries = deliveries + 1, token = ?, holder = ?, process = ?, deadline_s = ?"
        " WHERE id = ?",
        (token, holder, moment.process, moment.now_s + terms.lease_s, record.id),
    )
    return Batch(step, token, record.deliveries + 1, groups.fetch(db, record.group_ids))


def take(db: sqlite3.Connection, terms: LeaseTerms, moment: Moment) -> Batch | None:
    """Give out the next batch once and for all, for trainers that cannot acknowledge (Atropos' /batch).

    A batch that somebody gave back comes first. One that was trained never comes again on this way: such a
    trainer registers from step 0 each time it starts, and must not be fed the old data of the steps it counts
    anew.
    """
    state = runs.read(db)
    if state.trainer is None:
        return None
    if not state.started:
        runs.mark_started(db)
    step = state.current_step + 1
    record = _find(db, step)
    if record is not None and record.is_held(moment):
        return None
    if record is not None and record.state == "trained":
        chosen = _choose(db, state.trainer.batch_size, terms)
        if chosen is None:
            return None
        db.execute("UPDATE batches SET state = 'superseded' WHERE id = ?", (record.id,))
        record = _insert(db, step, chosen)
    elif record is None:
        record = _form(db, step, state.trainer.batch_size, terms)
    if record is None:
        return None
    token = secrets.token_hex(16)
    db.execute("UPDATE batches SET deliveries = deliveries + 1, token = ? WHERE id = ?", (token, record.id))
    _finish(db, record)
    return Batch(step, token, record.deliveries + 1, groups.fetch(db, record.group_ids))


def renew(db: sqlite3.Connection, step: int, token: str, lease_s: float, moment: Moment) -> None:
    """Hold on for longer. A lease that ran out may still be renewed, as long as nobody else took it."""
    record = _held_under(db, step, token)
    db.execute(
        "UPDATE batches SET process = ?, deadline_s = ? WHERE id = ?",
        (moment.process, moment.now_s + lease_s, record.id),
    )


def ack(db: sqlite3.Connection, step: int, token: str) -> None:
    """The step is trained. Saying so again under the same token (a lost answer) changes nothing."""
    record = _find(db, step)
    if record is None or record.token != token:
        raise StaleToken(f"the lease of step {step} is no longer yours")
    if record.holder is not None:
        _finish(db, record)


def nack(db: sqlite3.Connection, step: int, token: str, reason: str, max_deliveries: int) -> bool:
    """Give the batch back: it is delivered again, or dead-lettered after too many deliveries (then True).

    A batch that was trained before is only released: its groups did their work.
    """
    record = _held_under(db, step, token)
    if record.state == "open" and record.deliveries >= max_deliveries:
        _bury(db, record, reason or "given back without a reason")
        return True
    _release(db, "id = ?", record.id)
    return False


def release_holder(db: sqlite3.Connection, holder: str) -> None:
    """A trainer that registers anew has forgotten its leases; tokens of its earlier life become stale.

    That it was stopped says nothing against the groups: the delivery does not count.
    """
    db.execute("UPDATE batches SET deliveries = max(0, deliveries - 1) WHERE holder = ? AND state = 'open'", (holder,))
    _release(db, "holder = ?", holder)


def _find(db: sqlite3.Connection, step: int) -> _Record | None:
    row = db.execute(
        "SELECT id, step, state, group_ids, deliveries, token, holder, process, deadline_s FROM batches"
        " WHERE step = ? AND state IN ('open', 'trained')",
        (step,),
    ).fetchone()
    return None if row is None else _Record(*row)


def _held_under(db: sqlite3.Connection, step: int, token: str) -> _Record:
    record = _find(db, step)
    if record is None or record.token != token or record.holder is None:
        raise StaleToken(f"the lease of step {step} is no longer yours")
    return record


def _choose(db: sqlite3.Connection, batch_size: int, terms: LeaseTerms) -> list[int] | None:
    return terms.choose(groups.waiting(db, batch_size), batch_size) if batch_size > 0 else None


def _form(db: sqlite3.Connection, step: int, batch_size: int, terms: LeaseTerms) -> _Record | None:
    chosen = _choose(db, batch_size, terms)
    return None if chosen is None else _insert(db, step, chosen)


def _insert(db: sqlite3.Connection, step: int, chosen: list[int]) -> _Record:
    group_ids = json.dumps(chosen, separators=(",", ":"))
    db.execute("INSERT INTO batches (step, group_ids, formed_at) VALUES (?, ?, ?)", (step, group_ids, time.time()))
    groups.move(db, group_ids, "leased")
    record = _find(db, step)
    assert record is not None  # noqa: S101 - inserted two lines above
    return record


def _finish(db: sqlite3.Connection, record: _Record) -> None:
    # The token stays, so that a repeated acknowledgement is recognised.
    db.execute(
        "UPDATE batches SET state = 'trained', holder = NULL, process = NULL, deadline_s = NULL WHERE id = ?",
        (record.id,),
    )
    groups.move(db, record.group_ids, "trained")
    runs.set_step(db, record.step)


def _bury(db: sqlite3.Connection, record: _Record, reason: str) -> None:
    _release(db, "id = ?", record.id)
    db.execute("UPDATE batches SET state = 'dead' WHERE id = ?", (record.id,))
    groups.bury(db, record.group_ids, record.step, reason)


def _release(db: sqlite3.Connection, condition: str, value: int | str) -> None:
    nobody = "token = NULL, holder = NULL, process = NULL, deadline_s = NULL"
    db.execute(f"UPDATE batches SET {nobody} WHERE {condition}", (value,))  # noqa: S608 - both are literals
