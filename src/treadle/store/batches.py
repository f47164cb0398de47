"""Batches in the database: a record for each optimizer step, and who holds it.

A record says which groups a step is made of, in which order. It is committed before the batch is first given
out and never changes, so a trainer that resumes from an older checkpoint repeats its steps on the very same
data. The lease (holder, token, deadline) is beside it: taking or losing one changes nothing about the record.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from treadle.faults import reach
from treadle.store import groups, runs
from treadle.store.connection import Connection
from treadle.store.records import BatchPruned, EnvQueue, HeldByAnother, Lease, LeaseTerms, Plan, StaleToken, Waiting
from treadle.wire.hub import RegisterTrainer

# A trainer that resumes goes back to its last checkpoint, or to the one before when that is damaged.
CHECKPOINTS_KEPT = 2
TAKER = "/batch"  # the hub itself, in place of a trainer that takes batches there
_COLUMNS = "id, step, state, group_ids, deliveries, token, holder, process, deadline_s"
_ONE_DELIVERY_LESS = "deliveries = CASE WHEN deliveries > 0 THEN deliveries - 1 ELSE 0 END"


@dataclass(frozen=True, slots=True)
class ProcessTime:
    """Now, on the clock that deadlines are on. Deadlines on another process' clock count as passed."""

    process: str  # whose clock it is: that of one hub, or of the database server that several hubs share
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

    def is_held(self, moment: ProcessTime) -> bool:
        on_our_clock = self.holder is not None and self.process == moment.process
        return on_our_clock and self.deadline_s is not None and self.deadline_s > moment.now_s


def lease(db: Connection, step: int, holder: str, terms: LeaseTerms, moment: ProcessTime) -> Lease | None:
    """The recorded batch of `step`, or a new one; None when no exact batch can be formed now."""
    state = runs.read_run(db)
    if state.trainer is None:
        return None
    if not state.started:
        runs.set_started(db, True)
    record = _find(db, step)
    if record is not None and record.holder != holder and record.is_held(moment):
        raise HeldByAnother(f"step {step} is leased by '{record.holder}'")
    if record is not None and record.state == "pruned":
        raise BatchPruned(f"the data of step {step} is no longer kept", fix="raise --keep-trained-bytes of the hub")
    if record is not None and record.state == "open" and record.deliveries >= terms.max_deliveries:
        _bury(db, record, f"delivered {record.deliveries} times and never acknowledged")
        record = None
    if record is None:
        chosen = _choose(db, step, state.trainer.batch_size, terms)
        if chosen is None:
            return None
        record = _insert(db, step, chosen)
    return _lease_to(db, record, holder, terms, moment)


def take(db: Connection, terms: LeaseTerms, moment: ProcessTime) -> Lease | None:
    """The next batch, for a trainer that cannot acknowledge (Atropos' /batch).

    The hub acknowledges for it once the response has left, and returns the batch to the queue otherwise. A returned
    batch comes first. A trained one is never delivered this way again: such a trainer registers from step 0 at each
    start, and must not get the old data of the steps that it counts again.
    """
    state = runs.read_run(db)
    if state.trainer is None:
        return None
    if not state.started:
        runs.set_started(db, True)
    while (record := _next_to_take(db, state.trainer.batch_size, state.current_step, terms, moment)) is not None:
        if record.deliveries < terms.max_deliveries:
            return _lease_to(db, record, TAKER, terms, moment)
        _bury(db, record, f"delivered {record.deliveries} times and never acknowledged")
    return None


def _next_to_take(
    db: Connection, batch_size: int, current_step: int, terms: LeaseTerms, moment: ProcessTime
) -> _Record | None:
    for earlier in _open_records(db, up_to_step=current_step):
        if not earlier.is_held(moment):
            return earlier
    step = current_step + 1
    while (record := _find(db, step)) is not None and record.is_held(moment):  # on its way to another caller
        step += 1
    if record is not None and record.state == "open":
        return record
    chosen = _choose(db, step, batch_size, terms)
    if chosen is None:
        return None
    if record is not None:
        db.execute("UPDATE batches SET state = 'superseded' WHERE id = ?", (record.id,))
    return _insert(db, step, chosen)


def _lease_to(db: Connection, record: _Record, holder: str, terms: LeaseTerms, moment: ProcessTime) -> Lease:
    token = secrets.token_hex(16)
    runs.add_event(db, "leased", step=record.step, holder=holder, delivery=record.deliveries + 1)
    db.execute(
        "UPDATE batches SET deliveries = deliveries + 1, token = ?, holder = ?, process = ?, deadline_s = ?"
        " WHERE id = ?",
        (token, holder, moment.process, moment.now_s + terms.lease_s, record.id),
    )
    return Lease(record.step, token, record.deliveries + 1, record.group_ids)


def renew(db: Connection, step: int, token: str, lease_s: float, moment: ProcessTime) -> None:
    """Extend a lease. An expired one can be renewed until another trainer leases the batch."""
    record = _held_under(db, step, token)
    reach("store:renewing")
    db.execute(
        "UPDATE batches SET process = ?, deadline_s = ? WHERE id = ?",
        (moment.process, moment.now_s + lease_s, record.id),
    )


def ack(db: Connection, step: int, token: str, keep_trained_bytes: int) -> None:
    """Mark the step as trained. A repeat with the same token (after a lost response) changes nothing."""
    record = _find(db, step)
    trainer = runs.read_run(db).trainer
    if record is None or trainer is None or record.token != token:
        raise StaleToken(f"the lease of step {step} is no longer yours")
    if record.holder is not None:
        _finish(db, record, trainer, keep_trained_bytes)


def nack(db: Connection, step: int, token: str, reason: str, max_deliveries: int, counts: bool) -> bool:
    """Give the batch back: it is delivered again, or dead-lettered after too many deliveries (then True).

    A batch that was trained before is only released: its groups did their work. When it does not count, nothing is
    held against the groups: the trainer was stopped before it was done.
    """
    record = _held_under(db, step, token)
    if not counts:
        db.execute(f"UPDATE batches SET {_ONE_DELIVERY_LESS} WHERE id = ?", (record.id,))  # noqa: S608
    elif record.state == "open" and record.deliveries >= max_deliveries:
        _bury(db, record, reason or "given back without a reason")
        return True
    _release(db, "id = ?", record.id)
    runs.add_event(db, "returned", step=step, reason=reason)
    return False


def register_trainer(db: Connection, trainer: RegisterTrainer, holder: str | None, moment: ProcessTime) -> None:
    """Bring the batches in line with a trainer that registers; without a holder it is an Atropos trainer.

    The steps in the checkpoint that it resumes from are trained, also those that it could not acknowledge. Untrained
    batches of another size are requeued. For an Atropos trainer so are batches without a live holder: it counts steps
    from 0 again, and would reach a batch that was returned at step 500 only at its own step 500. The groups keep their
    places in the queue.
    """
    runs.register_trainer(db, trainer)
    for record in _open_records(db, up_to_step=trainer.starting_step):
        _finish(db, record, trainer, 2**62)
    has_size = trainer.batch_size > 0  # else nothing can be trained, and nothing is known of what will fit
    for record in _open_records(db):
        if has_size and groups.num_sequences(db, record.group_ids) != trainer.batch_size:
            _dissolve(db, record, "the trainer registered another batch size")
        elif holder is None and (record.holder == TAKER or not record.is_held(moment)):
            _dissolve(db, record, "another trainer registered")
    if has_size:
        groups.drop_oversize(db, trainer.batch_size, trainer.starting_step)
    if holder is not None:
        _release_holder(db, holder)


def _release_holder(db: Connection, holder: str) -> None:
    """Release the leases of a trainer that registers again; the tokens of its previous process become stale.

    The delivery counts only for the oldest batch, which it was training and which may have ended the process. Batches
    that it had leased ahead were not touched yet.
    """
    db.execute(
        f"UPDATE batches SET {_ONE_DELIVERY_LESS} WHERE holder = ? AND state = 'open'"  # noqa: S608
        " AND step > (SELECT min(step) FROM batches WHERE holder = ? AND state = 'open')",
        (holder, holder),
    )
    _release(db, "holder = ?", holder)


def set_damaged_aside(db: Connection, lease: Lease, damaged: Sequence[int]) -> None:
    """Set damaged groups aside; the other groups of the batch are queued again, in their old places.

    If the step was trained before and is only repeated, the others stay trained.
    """
    record = _find(db, lease.step)
    if record is None or record.token != lease.token:
        raise StaleToken(f"the lease of step {lease.step} is no longer yours")
    _dissolve(db, record, "damaged")
    groups.set_aside(db, json.dumps(damaged), "dead", record.step, "damaged")


def _dissolve(db: Connection, record: _Record, reason: str) -> None:
    """Delete the record; the groups are queued again unless they are trained."""
    if record.state == "open":
        groups.move(db, record.group_ids, "queued")
    db.execute("DELETE FROM batches WHERE id = ?", (record.id,))
    runs.add_event(db, "dissolved", step=record.step, reason=reason)


def _find(db: Connection, step: int) -> _Record | None:
    row = db.execute(
        f"SELECT {_COLUMNS} FROM batches WHERE step = ? AND state IN ('open', 'trained', 'pruned')",  # noqa: S608
        (step,),
    ).fetchone()
    return None if row is None else _Record(*row)


def _open_records(db: Connection, up_to_step: int = 2**62) -> list[_Record]:
    rows = db.execute(
        f"SELECT {_COLUMNS} FROM batches WHERE state = 'open' AND step <= ? ORDER BY step",  # noqa: S608
        (up_to_step,),
    )
    return [_Record(*row) for row in rows]


def _held_under(db: Connection, step: int, token: str) -> _Record:
    record = _find(db, step)
    if record is None or record.token != token or record.holder is None:
        raise StaleToken(f"the lease of step {step} is no longer yours")
    return record


def _env_queues(db: Connection, batch_size: int, is_alive: Callable[[int], bool]) -> list[EnvQueue]:
    """The queue as the choice sees it: of each environment and size, as many of the oldest as a batch can use.

    That is enough for any exact choice, and it is a bounded number however long the queue is.
    """
    sizes: dict[int | None, dict[int, int]] = {}
    for (env_id, size), num_groups in groups.queued_sizes(db).items():
        sizes.setdefault(env_id, {})[size] = num_groups
    supply = sum(size * num for by_size in sizes.values() for size, num in by_size.items())
    waiting: dict[int | None, list[Waiting]] = {
        env_id: [
            group
            for size in by_size
            if size <= batch_size <= supply  # with too few sequences in all, which they are does not matter
            for group in groups.oldest(db, env_id, size, batch_size // size)
        ]
        for env_id, by_size in sizes.items()
    }
    known = {env.env_id: env for env in runs.read_envs(db)}
    tags = {groups.env_id_of(name): tag for name, tag in db.execute("SELECT env, tag FROM env_queues")}
    made = []
    for env_id in {*waiting, *(env_id for env_id, env in known.items() if env.connected)}:
        env = None if env_id is None else known.get(env_id)
        made.append(
            EnvQueue(
                env_id=env_id,
                waiting=sorted(waiting.get(env_id, ())),
                sizes=sizes.get(env_id, {}),
                name=env.name if env else "posts without an environment",
                weight=env.weight if env else 1.0,
                tag=tags.get(env_id, 0.0),
                minimum=(env.min_batch_allocation or 0.0) if env and env.connected else 0.0,
                is_alive=env is not None and env.connected and is_alive(env.env_id),
                group_size=env.group_size if env and env.connected else 0,
            )
        )
    return sorted(made, key=lambda env_queue: -1 if env_queue.env_id is None else env_queue.env_id)


def plan_next(db: Connection, batch_size: int, terms: LeaseTerms) -> Plan:
    """The next batch, or why there is none. Changes nothing."""
    return terms.plan(_env_queues(db, batch_size, terms.is_alive), batch_size)


def _choose(db: Connection, step: int, batch_size: int, terms: LeaseTerms) -> list[int] | None:
    if batch_size <= 0:
        return None
    if terms.drop_older_than is not None:  # the trainer of step s is at version s - 1
        groups.drop_stale(db, step - 1 - terms.drop_older_than, step)
    if groups.counts(db).queued.sequences < batch_size:  # the usual case of a trainer that waits, answered at once
        return None
    plan = plan_next(db, batch_size, terms)
    if plan.misfits:
        groups.set_aside(db, json.dumps(plan.misfits), "dropped", step, "never_fits")
    if plan.ids is not None:
        db.execute("DELETE FROM env_queues")  # environments that are not written again have no debt
        tags = [("none" if env_id is None else str(env_id), tag) for env_id, tag in plan.tags.items()]
        for tag in tags:
            db.execute("INSERT INTO env_queues VALUES (?, ?)", tag)
        for name, why in plan.waived.items():
            runs.add_event(db, "minimum_waived", step=step, env=name, reason=why)
    return plan.ids


def _insert(db: Connection, step: int, chosen: list[int]) -> _Record:
    reach("store:forming")
    group_ids = json.dumps(chosen, separators=(",", ":"))
    db.execute("INSERT INTO batches (step, group_ids, formed_at) VALUES (?, ?, ?)", (step, group_ids, time.time()))
    groups.move(db, group_ids, "leased")
    runs.add_event(db, "formed", step=step, groups=len(chosen))
    record = _find(db, step)
    assert record is not None  # noqa: S101 - inserted two lines above
    return record


def _finish(db: Connection, record: _Record, trainer: RegisterTrainer, keep_trained_bytes: int) -> None:
    # The token stays, so that a repeated acknowledgement is recognised. What was pruned meanwhile stays pruned.
    db.execute(
        "UPDATE batches SET state = CASE state WHEN 'open' THEN 'trained' ELSE state END,"
        " holder = NULL, process = NULL, deadline_s = NULL WHERE id = ?",
        (record.id,),
    )
    groups.move(db, record.group_ids, "trained")
    # Batches may be acknowledged out of order; only a trainer that registers can go back.
    db.execute("UPDATE run SET current_step = ? WHERE current_step < ?", (record.step, record.step))
    runs.add_event(db, "trained", step=record.step)
    _prune(db, record.step, trainer.save_checkpoint_interval, keep_trained_bytes)


def _prune(db: Connection, step: int, save_interval: int, keep_trained_bytes: int) -> None:
    """Forget the data of the oldest steps when it takes too much room, but none that a resume may ask for.

    Without an interval the trainer saves only at the end, so everything may be asked for again; but never what
    another batch of the same step took the place of.
    """
    if groups.counts(db).trained.bytes <= keep_trained_bytes:
        return
    replaced = db.execute("SELECT id, group_ids FROM batches WHERE state = 'superseded' ORDER BY id LIMIT 2").fetchall()
    for batch_id, group_ids in replaced:
        groups.prune(db, group_ids)
        db.execute("DELETE FROM batches WHERE id = ?", (batch_id,))
    if replaced or save_interval <= 0:
        return
    done = db.execute(
        "SELECT id, group_ids FROM batches WHERE state = 'trained' AND step <= ? ORDER BY step LIMIT 2",
        (step - CHECKPOINTS_KEPT * save_interval,),
    ).fetchall()
    for batch_id, group_ids in done:  # two for each that is added: it shrinks until it is small enough
        groups.prune(db, group_ids)
        db.execute("UPDATE batches SET state = 'pruned' WHERE id = ?", (batch_id,))


def _bury(db: Connection, record: _Record, reason: str) -> None:
    _release(db, "id = ?", record.id)
    db.execute("UPDATE batches SET state = 'dead' WHERE id = ?", (record.id,))
    groups.set_aside(db, record.group_ids, "dead", record.step, reason)


def _release(db: Connection, condition: str, value: int | str) -> None:
    nobody = "token = NULL, holder = NULL, process = NULL, deadline_s = NULL"
    db.execute(f"UPDATE batches SET {nobody} WHERE {condition}", (value,))  # noqa: S608 - both are literals
