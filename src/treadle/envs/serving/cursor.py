"""Which items were begun and which are done; survives a kill, so that none is skipped and none is done twice.

{"next": 130, "begun": [126, 129]}     items 0 to 125, 127 and 128 are done
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from treadle.config.load import replace_text
from treadle.errors import ConfigError


class Cursor:
    """`index = cursor.take()` ... `cursor.finish(index)`, and `save()` now and then.

    What was not finished comes again after a restart.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._next = 0
        self._begun: set[int] = set()
        self._again: list[int] = []  # the smallest last
        self._is_saved = False
        if path.is_file():
            self._read()

    @property
    def num_done(self) -> int:
        return self._next - len(self._begun)

    def take(self) -> int:
        if self._again:
            return self._again.pop()
        index, self._next = self._next, self._next + 1
        self._begun.add(index)
        self._is_saved = False
        return index

    def finish(self, index: int) -> None:
        """Call it when the group is safe on disk, or will never be."""
        self._begun.discard(index)
        if index in self._again:
            self._again.remove(index)
        self._is_saved = False

    def give_back(self, index: int) -> None:
        """It comes again, after those that were given back before."""
        self._again.insert(0, index)

    def start_over(self) -> None:
        self._next, self._begun, self._again = 0, set(), []
        self._is_saved = False

    def _read(self) -> None:
        try:
            values = json.loads(self._path.read_text())
            self._next, self._begun = int(values["next"]), {int(index) for index in values["begun"]}
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{self._path} cannot be read: {error}", fix="delete it to begin with item 0") from None
        self._again = sorted(self._begun, reverse=True)

    async def save(self) -> None:
        """Often enough: what was finished since the last time would be done again, and the hub would not take it."""
        if not self._is_saved:
            text = json.dumps({"next": self._next, "begun": sorted(self._begun)})
            self._is_saved = True
            await asyncio.to_thread(replace_text, self._path, text)
