"""Search, page through and open the groups of a queue, on connections that never delay the hub.

The queue's tables hold what batches are chosen by. What people search for (scores, lengths, the start of the prompt,
the step it was trained in) is read from the payloads once and kept in `hub.sqlite.facts`. That file is derived and may
be deleted. It is filled from the newest group backwards, in small portions, and only while somebody searches.
"""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import msgspec

from treadle.store import database, groups
from treadle.store.connection import Connection, IndexSession
from treadle.store.database import SqliteConnection, SqliteReadSession
from treadle.store.records import Format, StoredGroup
from treadle.wire.groups import IGNORED, open_group, rows

SCHEMA_VERSION = 1
PREVIEW_CHARS = 160
MAX_BATCHES_AT_ONCE = 2_000
TABLES = """
CREATE TABLE facts (
    id INTEGER PRIMARY KEY,                      -- of the group
    score REAL, score_low REAL, score_high REAL, -- NULL: its content is no longer kept
    shortest INTEGER, longest INTEGER,           -- of its completions, in trained tokens
    prompt TEXT
) STRICT;
CREATE TABLE places (id INTEGER PRIMARY KEY, step INTEGER NOT NULL) STRICT;
CREATE INDEX places_by_step ON places (step, id);
CREATE TABLE reach (
    one INTEGER PRIMARY KEY CHECK (one = 1),
    low INTEGER NOT NULL, high INTEGER NOT NULL, -- groups from `low` to `high` have facts; none while high < low
    mark REAL NOT NULL,                          -- when group `high` arrived: another queue has another one there
    batch INTEGER NOT NULL                       -- the last batch whose groups have places
) STRICT;
INSERT INTO reach VALUES (1, 1, 0, 0.0, 0);
"""
_COLUMNS = (
    "g.id, g.state, g.env_id, g.size, g.num_tokens, g.num_bytes, g.policy_version, g.item, g.received_at,"
    " g.aside_reason, g.metrics, f.score, f.score_low, f.score_high, f.shortest, f.longest, f.prompt,"
    " CASE WHEN g.state IN ('leased', 'trained') THEN p.step ELSE g.aside_step END"
)
_CONDITIONS = {
    "step": "g.id IN (SELECT id FROM places WHERE step = ?)",
    "env_id": "g.env_id = ?",
    "state": "g.state = ?",
    "version": "g.policy_version = ?",
    "score_from": "f.score >= ?",
    "score_to": "f.score <= ?",
    "length_from": "f.longest >= ?",
    "length_to": "f.longest <= ?",
    "before": "g.id < ?",
}  # by the field of GroupFilter
_FROM = "FROM treadle.groups AS g LEFT JOIN facts AS f ON f.id = g.id LEFT JOIN places AS p ON p.id = g.id"


class GroupSummary(msgspec.Struct, frozen=True):
    """A group as a list shows it. What was not read out of its content yet, or no longer can be, is None."""

    id: int
    state: str
    env_id: int | None
    size: int
    num_tokens: int
    num_bytes: int
    policy_version: int | None
    item: int | None
    received_at: float
    aside_reason: str | None
    metrics: msgspec.Raw | None
    score: float | None
    score_low: float | None
    score_high: float | None
    shortest: int | None
    longest: int | None
    prompt: str | None
    step: int | None


@dataclass(frozen=True, slots=True)
class GroupFilter:
    """What to find; None: anything. `before` pages on: groups that arrived before this one.

    A group's score is the mean of its rollouts', its length that of its longest completion.
    """

    step: int | None = None
    env_id: int | None = None
    state: str | None = None
    version: int | None = None
    score_from: float | None = None
    score_to: float | None = None
    length_from: int | None = None
    length_to: int | None = None
    before: int | None = None


@dataclass(frozen=True, slots=True)
class IndexProgress:
    """How many groups there are, and how many of them have facts."""

    num_groups: int
    num_known: int


@dataclass(frozen=True, slots=True)
class StepEvent:
    at: float  # Unix time
    step: int | None


class Browser:
    """`with Browser.open(path) as browser: browser.find(GroupFilter(step=3), limit=50)`. May be shared."""

    def __init__(self, session: IndexSession) -> None:
        self._session = session
        self.learn(0)  # facts of an earlier queue under the same name are forgotten before anybody sees them

    @classmethod
    def open(cls, path: Path) -> Self:
        """`path` is the queue's file, which is only read."""
        facts_file = path.with_name(f"{path.name}.facts")
        try:
            db = _connect(facts_file, path)
        except sqlite3.DatabaseError:  # damaged, or of another version: rebuild it from the queue
            for part in ("", "-wal", "-shm"):
                facts_file.with_name(facts_file.name + part).unlink(missing_ok=True)
            db = _connect(facts_file, path)
        return cls(SqliteReadSession(db))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._session.close()

    def find(self, wanted: GroupFilter, limit: int) -> list[GroupSummary]:
        """The newest first."""
        asked = {sql: getattr(wanted, name) for name, sql in _CONDITIONS.items() if getattr(wanted, name) is not None}
        where = f"WHERE {' AND '.join(asked)}" if asked else ""
        rows = self._session.read(
            lambda db: db.execute(
                f"SELECT {_COLUMNS} {_FROM} {where} ORDER BY g.id DESC LIMIT ?",
                (*asked.values(), limit),
            ).fetchall()
        )
        summaries = []
        for row in rows:
            values = dict(zip(GroupSummary.__struct_fields__, row, strict=True))
            values["metrics"] = None if values["metrics"] is None else msgspec.Raw(values["metrics"])
            summaries.append(GroupSummary(**values))
        return summaries

    def neighbours(self, group_id: int) -> tuple[int | None, int | None]:
        """The groups that arrived before and after this one."""
        before, after = self._session.read(
            lambda db: db.execute(
                "SELECT (SELECT max(id) FROM treadle.groups WHERE id < ?),"
                " (SELECT min(id) FROM treadle.groups WHERE id > ?)",
                (group_id, group_id),
            ).fetchone()
        )
        return before, after

    def contents(self, ids: Sequence[int]) -> dict[int, StoredGroup]:
        """Of those that are still kept and undamaged."""

        def contents_of(db: Connection) -> dict[int, StoredGroup]:
            return {id: stored for id in ids if (stored := groups.read_checked(db, id)) is not None}

        return self._session.read(contents_of)

    def latest_events(self, kinds: Sequence[str]) -> dict[str, StepEvent]:
        """The last event of each kind that is kept, and its step."""

        def latest(db: Connection) -> list[tuple[str, float, str] | None]:
            sql = "SELECT kind, at, data FROM treadle.events WHERE kind = ? ORDER BY id DESC LIMIT 1"
            return [db.execute(sql, (kind,)).fetchone() for kind in kinds]

        found = [row for row in self._session.read(latest) if row is not None]
        return {kind: StepEvent(at=at, step=json.loads(data).get("step")) for kind, at, data in found}

    def reach(self) -> IndexProgress:
        def progress(db: Connection) -> IndexProgress:
            low, high = db.execute("SELECT low, high FROM reach").fetchone()
            (num_groups,) = db.execute("SELECT count(*) FROM treadle.groups").fetchone()
            (num_known,) = db.execute(
                "SELECT count(*) FROM treadle.groups WHERE id BETWEEN ? AND ?", (low, high)
            ).fetchone()
            return IndexProgress(num_groups=num_groups, num_known=num_known)

        return self._session.read(progress)

    def learn(self, limit: int) -> int:
        """Index up to `limit` more groups, new ones first, then backwards. Returns their number; 0: all are indexed.

        With a limit of 0, update only the step of each group.
        """
        return self._session.change(lambda db: _learn(db, limit))


def _connect(facts_file: Path, queue: Path) -> SqliteConnection:
    os.close(os.open(facts_file, os.O_RDWR | os.O_CREAT, 0o600))  # SQLite would let everybody read it
    facts_file.chmod(0o600)
    db = database.connect(facts_file, is_uri=True)
    try:
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = OFF")  # derived: what a power cut takes is read again
        (version,) = db.execute("PRAGMA user_version").fetchone()
        if version == 0:
            db.executescript(f"{TABLES} PRAGMA user_version = {SCHEMA_VERSION};")
        elif version != SCHEMA_VERSION:
            raise sqlite3.DatabaseError(f"facts of version {version}")
        db.execute("ATTACH ? AS treadle", (f"{queue.resolve().as_uri()}?mode=ro",))
    except BaseException:
        db.close()
        raise
    return db


def _learn(db: Connection, limit: int) -> int:
    low, high, mark, batch = db.execute(f"SELECT low, high, mark, batch FROM reach{db.for_update}").fetchone()  # noqa: S608
    found = db.execute("SELECT received_at FROM treadle.groups WHERE id = ?", (high,)).fetchone()
    if high >= low and (found is None or found[0] != mark):  # the queue was reset, or is another file
        db.execute("DELETE FROM facts")
        db.execute("DELETE FROM places")
        low, high, batch = 1, 0, 0
    batch = _learn_places(db, batch)
    (newest,) = db.execute("SELECT coalesce(max(id), 0) FROM treadle.groups").fetchone()
    if high < low:
        low, high = newest + 1, newest
    ids = [id for (id,) in db.execute("SELECT id FROM treadle.groups WHERE id > ? ORDER BY id LIMIT ?", (high, limit))]
    high = ids[-1] if ids else high
    backwards = db.execute(
        "SELECT id FROM treadle.groups WHERE id < ? ORDER BY id DESC LIMIT ?", (low, limit - len(ids))
    ).fetchall()
    low = backwards[-1][0] if backwards else low
    ids += [id for (id,) in backwards]
    for id in ids:
        stored = groups.read_checked(db, id)
        if stored is not None:
            db.execute("DELETE FROM facts WHERE id = ?", (id,))
            db.execute("INSERT INTO facts VALUES (?, ?, ?, ?, ?, ?, ?)", (id, *_facts(stored)))
    found = db.execute("SELECT received_at FROM treadle.groups WHERE id = ?", (high,)).fetchone()
    db.execute(
        "UPDATE reach SET low = ?, high = ?, mark = ?, batch = ?", (low, high, found[0] if found else 0.0, batch)
    )
    return len(ids)


def _learn_places(db: Connection, batch: int) -> int:
    """Later batches win: a group whose batch was dissolved is in another one then."""
    rows = db.execute(
        "SELECT id, step, group_ids FROM treadle.batches WHERE id > ? ORDER BY id LIMIT ?", (batch, MAX_BATCHES_AT_ONCE)
    ).fetchall()
    for id, step, group_ids in rows:
        for one in json.loads(group_ids):
            db.execute(
                "INSERT INTO places VALUES (?, ?) ON CONFLICT (id) DO UPDATE SET step = excluded.step", (one, step)
            )
        batch = id
    return batch


class _Gist(msgspec.Struct):
    """Of a group in JSON, what the facts are made of; the rest is skipped over."""

    masks: list[list[int]]
    scores: list[float]
    messages: list[list[dict[str, Any]]] | None = None


_GIST = msgspec.json.Decoder(_Gist)


def _facts(stored: StoredGroup) -> tuple[float, float, float, int, int, str]:
    gist = _gist(stored.format, stored.payload)
    lengths = [len(row) - row.count(IGNORED) for row in gist.masks]
    mean = sum(gist.scores) / len(gist.scores)
    # The preview is the start of the last message that is not the assistant's.
    first = gist.messages[0] if gist.messages else ()
    asked = [str(message.get("content", "")) for message in first if message.get("role") != "assistant"]
    # PostgreSQL stores no NUL.
    preview = " ".join(asked[-1].replace("\0", " ").split())[:PREVIEW_CHARS] if asked else ""
    return mean, min(gist.scores), max(gist.scores), min(lengths), max(lengths), preview


def _gist(format: Format, payload: bytes) -> _Gist:
    if format == "json":
        return _GIST.decode(payload)
    group = open_group(payload)
    return _Gist(
        masks=rows("i", group.masks, group.lengths),
        scores=group.scores,
        messages=group.rest.messages if group.rest else None,
    )
