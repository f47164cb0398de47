"""Groups in the database: append, count, look. Every function takes the connection and does one thing."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Sequence

from treadle.store.records import Appended, Counts, DeadGroup, EnvLoad, Post, StoredGroup, Tally, Waiting
from treadle.store.refusals import KeyReused, QueueFull


def append(db: sqlite3.Connection, post: Post, limit_groups: int) -> Appended:
    """Store the groups of one request. A repeated key stores nothing, even when the queue is full by now."""
    if post.key is not None:
        earlier = db.execute("SELECT body_hash, num_groups FROM posts WHERE key = ?", (post.key,)).fetchone()
        if earlier is not None:
            if earlier[0] != post.body_hash:
                raise KeyReused("this idempotency key was used for another body")
            return Appended(num_groups=earlier[1], duplicate=True)
    waiting = counts(db).queued.groups
    if waiting + len(post.groups) > limit_groups and post.groups:
        raise QueueFull(f"{waiting} groups wait for the trainer; the limit is {limit_groups}")
    if post.key is not None:
        db.execute("INSERT INTO posts VALUES (?, ?, ?)", (post.key, post.body_hash, len(post.groups)))
    now = time.time()
    for group in post.groups:
        db.execute(
            "INSERT INTO groups"
            " (env_id, size, num_tokens, policy_version, item, received_at, metrics, payload)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            (group.env_id, group.size, group.num_tokens, group.policy_version, group.item, now, group.metrics,
             group.payload),
        )  # fmt: skip
        db.execute("UPDATE envs SET groups_accepted = groups_accepted + 1 WHERE env_id = ?", (group.env_id,))
    return Appended(num_groups=len(post.groups))


def waiting(db: sqlite3.Connection, batch_size: int) -> list[Waiting]:
    """The oldest groups that can be part of a batch: a bounded window, however long the queue is.

    A batch needs at most `batch_size` groups (of one sequence each); the slack lets the choice pass over
    some.
    """
    slack = 256
    window = min(batch_size, 2**31) + slack  # a trainer may register any 64-bit number
    rows = db.execute(
        "SELECT id, size FROM groups WHERE state = 'queued' AND size <= ? ORDER BY id LIMIT ?",
        (batch_size, window),
    )
    return [Waiting(*row) for row in rows]


def fetch(db: sqlite3.Connection, group_ids: str) -> Sequence[StoredGroup]:
    """The groups of a JSON array of ids, in its order."""
    rows = db.execute(
        "SELECT g.id, g.payload, g.policy_version, g.item, g.metrics"
        " FROM json_each(?) AS j JOIN groups AS g ON g.id = j.value ORDER BY j.key",
        (group_ids,),
    )
    return [StoredGroup(*row) for row in rows]


def move(db: sqlite3.Connection, group_ids: str, state: str) -> None:
    db.execute(
        "UPDATE groups SET state = ? WHERE id IN (SELECT value FROM json_each(?)) AND state != ?",
        (state, group_ids, state),
    )


def bury(db: sqlite3.Connection, group_ids: str, step: int, reason: str) -> None:
    """Set groups aside for good. They stay in the file, with the reason."""
    move(db, group_ids, "dead")
    db.execute(
        "UPDATE groups SET dead_step = ?, dead_reason = ? WHERE id IN (SELECT value FROM json_each(?))",
        (step, reason, group_ids),
    )


def latest_payload(db: sqlite3.Connection) -> bytes | None:
    row = db.execute("SELECT payload FROM groups ORDER BY id DESC LIMIT 1").fetchone()
    return None if row is None else bytes(row[0])


def counts(db: sqlite3.Connection) -> Counts:
    rows = db.execute("SELECT state, sum(groups), sum(sequences) FROM tally GROUP BY state")
    return Counts(**{state: Tally(groups, sequences) for state, groups, sequences in rows})


def waiting_sizes(db: sqlite3.Connection) -> dict[int, int]:
    """How many groups of each size wait: {8: 3} is three groups of eight sequences."""
    rows = db.execute("SELECT size, count(*) FROM groups WHERE state = 'queued' GROUP BY size ORDER BY size")
    return dict(rows.fetchall())


def env_load(db: sqlite3.Connection, env_id: int) -> EnvLoad:
    rows = db.execute("SELECT env, sequences FROM tally WHERE state = 'queued' AND groups > 0").fetchall()
    (largest,) = db.execute("SELECT max(size) FROM groups WHERE state = 'queued'").fetchone()
    (own,) = db.execute("SELECT max(size) FROM groups WHERE state = 'queued' AND env_id = ?", (env_id,)).fetchone()
    sequences = {None if env == "none" else int(env): total for env, total in rows}
    return EnvLoad(sequences=sequences, largest_group=largest or 0, largest_own_group=own or 0)


def dead_groups(db: sqlite3.Connection, limit: int) -> list[DeadGroup]:
    rows = db.execute(
        "SELECT id, env_id, size, item, policy_version, dead_step, dead_reason FROM groups"
        " WHERE state = 'dead' ORDER BY id DESC LIMIT ?",
        (limit,),
    )
    return [DeadGroup(*row) for row in rows]
