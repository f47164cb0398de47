"""Append, count and read groups. Every function takes the connection and does one thing."""

from __future__ import annotations

import json
import time
import zlib
from collections import Counter

from treadle.store import runs
from treadle.store.connection import Connection
from treadle.store.records import (
    Appended,
    BatchPruned,
    Counts,
    EnvLoad,
    Figures,
    Format,
    KeyReused,
    Limits,
    Post,
    QueueFull,
    StaleToken,
    StoredGroup,
    Tally,
    Waiting,
)
from treadle.wire.hub import DeadLetter

Size = tuple[int | None, int]  # (env id, sequences of a group)


def append(db: Connection, post: Post, limits: Limits) -> Appended:
    """Store the groups of one request. A repeated key stores nothing, even when the queue is full by now.

    Keys are kept as long as the rows of their groups, until a reset: no clock decides when a retry is a new post. A
    request without groups needs no key: to repeat it changes nothing.
    """
    if post.key is not None:
        earlier = db.execute("SELECT body_hash, num_groups FROM posts WHERE key = ?", (post.key,)).fetchone()
        if earlier is not None:
            if earlier[0] != post.body_hash:
                raise KeyReused("this idempotency key was used for another body")
            return Appended(num_groups=earlier[1], duplicate=True)
    if not post.groups:
        return Appended(num_groups=0)
    _check_room(db, post, limits)
    now = time.time()
    if post.key is not None:
        db.execute("INSERT INTO posts VALUES (?, ?, ?)", (post.key, post.body_hash, len(post.groups)))
    for group in post.groups:
        crc = content_crc(
            group.payload, group.format, group.env_id, group.size, group.policy_version, group.item, group.metrics
        )
        (group_id,) = db.execute(
            "INSERT INTO groups"
            " (env_id, size, num_tokens, num_bytes, crc, policy_version, item, received_at, metrics)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?) RETURNING id",
            (group.env_id, group.size, group.num_tokens, len(group.payload), crc,
             group.policy_version, group.item, now, group.metrics),
        ).fetchone()  # fmt: skip
        db.execute("INSERT INTO payloads VALUES (?, ?, ?)", (group_id, group.format, group.payload))
    by_env = Counter(group.env_id for group in post.groups)
    for env_id, num_groups in by_env.items():
        if env_id is not None:
            db.execute("UPDATE envs SET groups_accepted = groups_accepted + ? WHERE env_id = ?", (num_groups, env_id))
    num_sequences = sum(group.size for group in post.groups)
    runs.add_event(db, "accepted", groups=len(post.groups), sequences=num_sequences, envs=list(by_env))
    return Appended(num_groups=len(post.groups))


def _check_room(db: Connection, post: Post, limits: Limits) -> None:
    waiting = counts(db).queued
    num_bytes = sum(len(group.payload) for group in post.groups)
    if waiting.groups + len(post.groups) > limits.groups:
        full = f"{waiting.groups} groups wait for the trainer; the limit is {limits.groups}"
    elif waiting.bytes + num_bytes > limits.bytes:
        full = f"{waiting.bytes / 1e6:.0f} MB wait for the trainer; the limit is {limits.bytes / 1e6:.0f} MB"
    else:
        return
    posted: Counter[int | None] = Counter()
    for group in post.groups:
        posted[group.env_id] += group.size
    if not all(_is_needed(db, env_id, num_sequences) for env_id, num_sequences in posted.items()):
        raise QueueFull(full)


def _is_needed(db: Connection, env_id: int | None, num_sequences: int) -> bool:
    """Whether a batch may lack just what this environment sends: then it may post although others filled the queue.

    It sends no more than a batch, and has nothing waiting, or less than the share of a batch that is set aside for it.
    """
    env = None if env_id is None else runs.read_env(db, env_id)
    trainer = runs.read_run(db).trainer
    if env is None or trainer is None or num_sequences > trainer.batch_size:
        return False
    waiting = sum(size * num for (owner, size), num in queued_sizes(db).items() if owner == env_id)
    return waiting < max(1, int(trainer.batch_size * min(1.0, env.min_batch_allocation or 0.0)))


def queued_sizes(db: Connection) -> dict[Size, int]:
    """How many groups of each environment and size wait: {(0, 8): 3} is three groups of eight of environment 0."""
    rows = db.execute("SELECT env, size, groups FROM tally WHERE state = 'queued' AND groups > 0")
    return {(env_id_of(env), size): num for env, size, num in rows}


def env_id_of(name: str) -> int | None:
    """The environment that a primary key names: "none" stands for NULL, which a key cannot hold."""
    return None if name == "none" else int(name)


def oldest(db: Connection, env_id: int | None, size: int, limit: int) -> list[Waiting]:
    owned, owner = _owned_by(env_id)
    rows = db.execute(
        f"SELECT id, size FROM groups WHERE state = 'queued' AND {owned} AND size = ? ORDER BY id LIMIT ?",  # noqa: S608
        (*owner, size, limit),
    )
    return [Waiting(*row) for row in rows]


def _owned_by(env_id: int | None) -> tuple[str, tuple[int, ...]]:
    """A condition and its parameters. Two forms: no single one uses an index in both databases."""
    return ("env_id IS NULL", ()) if env_id is None else ("env_id = ?", (env_id,))


def content_crc(payload: bytes, *fields: object) -> int:
    """The checksum that is stored with the group. The fields: format, env id, size, policy version, item, metrics."""
    return zlib.crc32(repr(list(fields)).encode(), zlib.crc32(payload))


def fetch(db: Connection, group_ids: str) -> tuple[list[StoredGroup], list[int]]:
    """The groups of a JSON array of ids, in its order; and the ids of those that are not as they were written."""
    stored, damaged = [], []
    with db.snapshot():
        for group_id in json.loads(group_ids):
            try:
                kept = db.execute("SELECT num_bytes FROM groups WHERE id = ?", (group_id,)).fetchone()
                group = read_checked(db, group_id)
            except Exception as error:
                if not db.is_damage(error):
                    raise
                kept, group = (-1,), None
            if kept is None:
                raise StaleToken("the hub was reset: this lease is no longer yours")
            if kept == (0,):
                raise BatchPruned(
                    "the data of this step is no longer kept", fix="raise --keep-trained-bytes of the hub"
                )
            if group is None:
                damaged.append(group_id)
            else:
                stored.append(group)
    return stored, damaged


def read_checked(db: Connection, group_id: int) -> StoredGroup | None:
    """None: its content is not as it was written, or no longer kept."""
    row = db.execute(
        "SELECT g.received_at, g.crc, p.body, p.format, g.env_id, g.size, g.policy_version, g.item, g.metrics"
        " FROM groups AS g JOIN payloads AS p ON p.id = g.id WHERE g.id = ?",
        (group_id,),
    ).fetchone()
    if row is None:
        return None
    received_at, crc, *content = row
    payload, format, _, _, policy_version, item, metrics = content
    if content_crc(*content) != crc:
        return None
    return StoredGroup(group_id, format, payload, policy_version, item, metrics, received_at)


def num_sequences(db: Connection, group_ids: str) -> int:
    (num,) = db.execute(
        f"SELECT coalesce(sum(size), 0) FROM groups WHERE id IN {db.ids_in}",  # noqa: S608
        (group_ids,),
    ).fetchone()
    return int(num)


def move(db: Connection, group_ids: str, state: str) -> None:
    db.execute(
        f"UPDATE groups SET state = ? WHERE id IN {db.ids_in} AND state != ?",  # noqa: S608
        (state, group_ids, state),
    )


def set_aside(db: Connection, group_ids: str, state: str, step: int, reason: str) -> None:
    """Take groups out of the queue permanently. They stay in the file, with the reason."""
    changed = db.execute(
        f"UPDATE groups SET state = ?, aside_step = ?, aside_reason = ? WHERE id IN {db.ids_in}",  # noqa: S608
        (state, step, reason, group_ids),
    )
    if changed.rowcount:
        runs.add_event(db, state, groups=changed.rowcount, step=step, reason=reason)


def drop_stale(db: Connection, oldest_version: int, step: int) -> None:
    stale = db.execute(
        "SELECT id FROM groups WHERE state = 'queued' AND policy_version IS NOT NULL AND policy_version < ?",
        (oldest_version,),
    )
    set_aside(db, json.dumps([group_id for (group_id,) in stale]), "dropped", step, "stale")


def drop_oversize(db: Connection, batch_size: int, step: int) -> None:
    """Queued groups may be larger than the batches of a trainer that registers later."""
    oversize = db.execute("SELECT id FROM groups WHERE state = 'queued' AND size > ?", (batch_size,))
    set_aside(db, json.dumps([group_id for (group_id,) in oversize]), "dropped", step, "oversize")


def prune(db: Connection, group_ids: str) -> None:
    """Forget the content of groups that are done with; that they were here is kept."""
    db.execute(f"DELETE FROM payloads WHERE id IN {db.ids_in}", (group_ids,))  # noqa: S608
    db.execute(f"UPDATE groups SET num_bytes = 0 WHERE id IN {db.ids_in}", (group_ids,))  # noqa: S608


def latest_payload(db: Connection) -> tuple[Format, bytes] | None:
    row = db.execute("SELECT format, body FROM payloads ORDER BY id DESC LIMIT 1").fetchone()
    row = row or db.execute("SELECT latest_format, latest FROM run WHERE latest IS NOT NULL").fetchone()
    return None if row is None else (row[0], bytes(row[1]))


# PostgreSQL's sums of BIGINT are of another type.
_SUMS = "CAST(sum(groups) AS BIGINT), CAST(sum(groups * size) AS BIGINT), CAST(sum(bytes) AS BIGINT)"


def counts(db: Connection) -> Counts:
    rows = db.execute(f"SELECT state, {_SUMS} FROM tally GROUP BY state")  # noqa: S608
    return Counts(**{state: Tally(*sums) for state, *sums in rows})


def tallies(db: Connection) -> dict[tuple[str, int | None], Tally]:
    """How much there is by state and environment."""
    rows = db.execute(f"SELECT state, env, {_SUMS} FROM tally GROUP BY state, env")  # noqa: S608
    return {(state, env_id_of(env)): Tally(*sums) for state, env, *sums in rows}


def untrained_sequences(db: Connection, env_id: int) -> int:
    """The sequences of an environment that wait, and those in batches that were given out."""
    (number,) = db.execute(
        "SELECT sum(groups * size) FROM tally WHERE state IN ('queued', 'leased') AND env = ?", (str(env_id),)
    ).fetchone()
    return int(number or 0)


def oldest_waiting_at(db: Connection) -> float | None:
    """When the group arrived that has waited longest."""
    first = [
        group.id for env_id, size in queued_sizes(db) for group in oldest(db, env_id, size, limit=1)
    ]  # of each environment and size
    (oldest_at,) = db.execute(
        f"SELECT min(received_at) FROM groups WHERE id IN {db.ids_in}",  # noqa: S608
        (json.dumps(first),),
    ).fetchone()
    return None if oldest_at is None else float(oldest_at)


def env_load(db: Connection, env_id: int) -> EnvLoad:
    sequences: dict[int | None, int] = {}
    largest = largest_own = 0
    for (owner, size), num_groups in queued_sizes(db).items():
        sequences[owner] = sequences.get(owner, 0) + size * num_groups
        largest = max(largest, size)
        largest_own = max(largest_own, size) if owner == env_id else largest_own
    return EnvLoad(sequences=sequences, largest_group=largest, largest_own_group=largest_own)


def dead_groups(db: Connection, limit: int = 1000) -> list[DeadLetter]:
    """The newest first."""
    rows = db.execute(
        "SELECT id, env_id, size, item, policy_version, aside_step, aside_reason FROM groups"
        " WHERE state = 'dead' ORDER BY id DESC LIMIT ?",
        (limit,),
    )
    return [DeadLetter(**dict(zip(DeadLetter.__struct_fields__, row, strict=True))) for row in rows]


def read_figures(db: Connection, after_event: int) -> Figures:
    with db.snapshot():
        _, newest_event = runs.event_ends(db)
        dropped = db.execute("SELECT env_id, aside_reason, count(*) FROM groups WHERE state = 'dropped' GROUP BY 1, 2")
        waived = db.execute("SELECT data FROM events WHERE id > ? AND kind = 'minimum_waived'", (after_event,))
        return Figures(
            run=runs.read_run(db),
            envs=runs.read_envs(db),
            groups=tallies(db),
            dropped={(env_id, reason): num for env_id, reason, num in dropped},
            oldest_waiting_at=oldest_waiting_at(db),
            waived=Counter(json.loads(data)["env"] for (data,) in waived),
            newest_event=newest_event,
        )
