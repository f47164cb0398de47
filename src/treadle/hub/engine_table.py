"""The engines of a run: reports of the engines, joined with the verdicts of the trainer.

Both are repeated every few seconds, so the table is in memory, and complete again within seconds of a restart.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable

from treadle.wire.engines import (
    SILENT_AFTER_S,
    EngineChange,
    EngineEntry,
    EngineHistory,
    Engines,
    EngineState,
    EngineVerdict,
    EngineVerdicts,
    ServedEngine,
)
from treadle.wire.hub import LastReport

MAX_CHANGES = 2000


class EngineTable:
    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.posted_here: EngineVerdicts | None = None
        self._in_force: EngineVerdicts | None = None  # posted here or to another hub; None: no trainer has posted any
        self._verdicts: dict[str, EngineVerdict] = {}
        self._judged_s = 0.0
        self._known: dict[str, EngineEntry] = {}  # as of the last change
        self._changes: deque[EngineChange] = deque(maxlen=MAX_CHANGES)

    def judge(self, verdicts: EngineVerdicts) -> None:
        """Take verdicts that were posted here, unless later ones are in force."""
        if self._in_force is None or verdicts.sequence >= self._in_force.sequence:
            self.posted_here = verdicts
            self._take(verdicts)

    def hear(self, posted_elsewhere: Iterable[EngineVerdicts]) -> None:
        """Verdicts that were posted to other hubs replace those in force if they are later."""
        posted = [*posted_elsewhere, *([] if self._in_force is None else [self._in_force])]
        last = max(posted, key=lambda verdicts: verdicts.sequence, default=None)
        if last is not None and last != self._in_force:
            self._take(last)

    def _take(self, verdicts: EngineVerdicts) -> None:
        self._in_force, self._judged_s = verdicts, self._clock()
        self._verdicts = {verdict.engine_id: verdict for verdict in verdicts.engines}

    def clear(self) -> None:
        self.posted_here = self._in_force = None
        self._verdicts = {}
        self._known.clear()
        self._changes.clear()

    def history(self) -> EngineHistory:
        return EngineHistory(now=time.time(), changes=list(self._changes))

    def rows(self, reports: Iterable[LastReport], num_present: int = 1, spread_s: float = 0.0) -> Engines:
        """The table, ordered by name. An engine that was restarted at an address replaces the one that was there."""
        judged_s = round(self._clock() - self._judged_s, 1)
        reported: dict[str, LastReport] = {}
        for one in reports:
            served = one.report.serves
            if served is not None and (served.engine_id not in reported or self._has_verdict(served)):
                reported[served.engine_id] = one
        entries = [_reporting(one, self._verdicts.get(engine_id)) for engine_id, one in reported.items()]
        taken = {entry.url for entry in entries if entry.state != "silent"}
        entries += [
            _judged_only(verdict, judged_s)
            for engine_id, verdict in self._verdicts.items()
            if engine_id not in reported and verdict.url not in taken
        ]
        self._record(entries)
        return Engines(
            engines=sorted(entries, key=lambda entry: (entry.name, entry.url)),
            has_trainer=self._in_force is not None,
            num_present=num_present,
            sequence=0 if self._in_force is None else self._in_force.sequence,
            spread_s=spread_s,
        )

    def _has_verdict(self, served: ServedEngine) -> bool:
        verdict = self._verdicts.get(served.engine_id)
        return verdict is not None and verdict.url == served.url

    def _record(self, entries: Iterable[EngineEntry]) -> None:
        """Keep what has changed since the last call; trainer and environments call at least once a second."""
        now, there = time.time(), {entry.engine_id: entry for entry in entries}
        for engine_id, before in list(self._known.items()):
            if engine_id not in there:
                del self._known[engine_id]
                self._changes.append(EngineChange(at=now, name=before.name, state="gone"))
        for engine_id, entry in there.items():
            known = self._known.get(engine_id)
            if known is None or known.state != entry.state:
                change = EngineChange(
                    at=now, name=entry.name, state=entry.state, proved_version=entry.proved_version, reason=entry.reason
                )
                self._changes.append(change)
                self._known[engine_id] = entry


def _reporting(last: LastReport, verdict: EngineVerdict | None) -> EngineEntry:
    report, served = last.report, last.report.serves
    assert served is not None  # noqa: S101 - the caller has chosen those
    state: EngineState = "joining" if verdict is None else verdict.state
    return EngineEntry(
        engine_id=served.engine_id,
        name=report.name,
        url=served.url if verdict is None else verdict.url,  # a proof holds for the URL where the trainer asked for it
        state="silent" if last.heard_s > SILENT_AFTER_S else state,
        policy_version=report.policy_version,
        proved_since=None if verdict is None else verdict.proved_since,
        proved_version=None if verdict is None else verdict.proved_version,
        proved_at=None if verdict is None else verdict.proved_at,
        heard_s=last.heard_s,
        reason="" if verdict is None else verdict.reason,
        served=served,
    )


def _judged_only(verdict: EngineVerdict, judged_s: float) -> EngineEntry:
    """An engine that does not report to this hub, or not any more: the trainer alone says how it stands."""
    return EngineEntry(
        engine_id=verdict.engine_id,
        name=verdict.url,
        url=verdict.url,
        state=verdict.state,
        proved_since=verdict.proved_since,
        proved_version=verdict.proved_version,
        proved_at=verdict.proved_at,
        heard_s=judged_s,
        reason=verdict.reason,
    )
