"""The processes of a run as they report themselves, and who keeps whom waiting. In memory: they report again."""

from __future__ import annotations

from collections.abc import Callable

from treadle.watch.telling import LAST_WORD, cleaned, tell_wait
from treadle.wire.hub import ProcessReport, ProcessStanding, ReportTaken

FORGOTTEN_AFTER_S = 600.0
MOST_PROCESSES = 1000
DUMPS_APART_S = 60.0  # stacks are long, and a disk is not endless

_Key = tuple[str, str, int]  # kind, machine, pid


class Board:
    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._reports: dict[_Key, tuple[ProcessReport, float]] = {}
        self._to_dump: dict[_Key, str] = {}
        self._blamed: set[tuple[_Key, str]] = set()  # the waits, by who waits and for what, that were acted upon
        self._dumped_s: dict[_Key, float] = {}
        self._hub_dumped_s = -DUMPS_APART_S
        self.hub_is_blamed = ""  # why the hub itself should write its stacks; to be emptied by who does

    def take(self, report: ProcessReport) -> ReportTaken:
        """Note how a process stands; answers whether it should write its stacks, because somebody waits for it."""
        report = cleaned(report)
        key = (report.kind, report.machine, report.pid)
        self._forget_old()
        if report.state == LAST_WORD:
            self._reports.pop(key, None)
            self._to_dump.pop(key, None)
            return ReportTaken()
        if key not in self._reports and len(self._reports) >= MOST_PROCESSES:
            return ReportTaken()  # what is not kept is not blamed either: nothing would ever forget it
        self._reports[key] = (report, self._clock())
        self._blame(key, report)
        return ReportTaken(dump=self._may_dump(key))

    def standings(self) -> list[ProcessStanding]:
        self._forget_old()
        now_s = self._clock()
        return [
            ProcessStanding(report=report, heard_s=round(now_s - heard_s, 1))
            for report, heard_s in self._reports.values()
        ]

    def clear(self) -> None:
        self._reports.clear()
        self._to_dump.clear()
        self._blamed.clear()

    def _may_dump(self, key: _Key) -> str:
        why = self._to_dump.pop(key, "")
        if not why or self._clock() - self._dumped_s.get(key, -DUMPS_APART_S) < DUMPS_APART_S:
            return ""
        self._dumped_s[key] = self._clock()
        return why

    def _blame(self, key: _Key, report: ProcessReport) -> None:
        """Once for each wait: whose turn it is writes its stacks with its next report."""
        late = {(key, wait.what) for wait in report.waits if wait.is_late}
        self._blamed = {(who, what) for who, what in self._blamed if who != key or (who, what) in late}
        for wait in report.waits:
            if wait.is_late and (key, wait.what) not in self._blamed:
                self._blamed.add((key, wait.what))
                if wait.of == "hub" and self._clock() - self._hub_dumped_s >= DUMPS_APART_S:
                    self._hub_dumped_s, self.hub_is_blamed = self._clock(), tell_wait(report, wait)
                for other in self._reports:
                    if other[0] == wait.of and other != key:
                        self._to_dump[other] = tell_wait(report, wait)

    def _forget_old(self) -> None:
        now_s = self._clock()
        for key in [key for key, (_, heard_s) in self._reports.items() if now_s - heard_s > FORGOTTEN_AFTER_S]:
            del self._reports[key]
            self._to_dump.pop(key, None)
            self._dumped_s.pop(key, None)
            self._blamed = {(who, what) for who, what in self._blamed if who != key}
