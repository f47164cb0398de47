"""Read the figures of the metrics page in one transaction, so that they agree with each other."""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from treadle.store import envs, events, groups, runs
from treadle.store.records import EnvRecord, RunState, Tally

EnvId = int | None  # None: posted without one


@dataclass(frozen=True, slots=True)
class Figures:
    run: RunState
    envs: list[EnvRecord]
    groups: Mapping[tuple[str, EnvId], Tally]  # by state and environment
    dropped: Mapping[tuple[EnvId, str], int]  # groups, by environment and reason
    oldest_waiting_at: float | None
    waived: Mapping[str, int]  # minimums that were not waited for since the event that was asked for, by env's name
    newest_event: int


def read(db: sqlite3.Connection, after_event: int) -> Figures:
    db.execute("BEGIN")
    try:
        _, newest_event = events.ends(db)
        return Figures(
            run=runs.read(db),
            envs=envs.read_all(db),
            groups=groups.tallies(db),
            dropped=groups.counts_aside(db),
            oldest_waiting_at=groups.oldest_waiting_at(db),
            waived=_waived(db, after_event),
            newest_event=newest_event,
        )
    finally:
        db.execute("COMMIT")


def _waived(db: sqlite3.Connection, after_event: int) -> Counter[str]:
    rows = db.execute(
        "SELECT json_extract(data, '$.env') FROM events WHERE id > ? AND kind = 'minimum_waived'", (after_event,)
    )
    return Counter(name for (name,) in rows)
