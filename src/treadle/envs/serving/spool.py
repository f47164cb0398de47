"""Scored groups on disk until the hub has taken them: neither a failed post nor a killed process loses one.

STATE/spool/000130-gsm8k-0-item-126.groups      waits to be posted, oldest first
STATE/refused/...                               the hub will never take it; kept to be looked at
STATE/of-run-4f1c.../...                        left by an earlier run; not this run's to deliver
"""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import quote, unquote

from treadle.wire.binary import pack_group
from treadle.wire.groups import ScoredGroup

SUFFIX = ".groups"
UNFINISHED = ".partial"


class Spool:
    def __init__(self, folder: Path) -> None:
        self._folder = folder / "spool"
        self._refused = folder / "refused"
        self._folder.mkdir(parents=True, exist_ok=True)
        for path in self._folder.glob(f"*{UNFINISHED}"):  # killed while it wrote: the item is asked again
            path.unlink()
        self._count = max((int(path.name.partition("-")[0]) for path in self.waiting()), default=-1) + 1

    def put(self, key: str, group: ScoredGroup) -> Path:
        """On disk when this returns. `key` is what the hub knows a repeated delivery by."""
        path = self._folder / f"{self._count:06d}-{quote(key, safe='')}{SUFFIX}"
        self._count += 1
        unfinished = path.with_suffix(UNFINISHED)
        with unfinished.open("wb") as file:
            file.write(pack_group(group))
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
        return path

    def waiting(self) -> list[Path]:
        """Files of packed groups; whoever has delivered one deletes it."""
        return sorted(self._folder.glob(f"*{SUFFIX}"))

    @staticmethod
    def key_of(path: Path) -> str:
        return unquote(path.name.removesuffix(SUFFIX).partition("-")[2])

    def refuse(self, path: Path) -> Path:
        self._refused.mkdir(exist_ok=True)
        return path.replace(self._refused / path.name)

    def put_aside(self, name: str) -> Path | None:
        """What an earlier run left, refused or not. Where it went, or None if there was nothing."""
        left = [*self.waiting(), *sorted(self._refused.glob(f"*{SUFFIX}"))]
        if not left:
            return None
        aside = self._folder.parent / name
        for path in left:
            (aside / path.parent.name).mkdir(parents=True, exist_ok=True)
            path.replace(aside / path.parent.name / path.name)
        return aside
