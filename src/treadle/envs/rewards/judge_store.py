"""Keep a judge's answers and what it has spent, in an SQLite file or in memory."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from treadle.errors import ConfigError, ScoringError

MAX_KEPT_CHARS = 4000  # of an answer: its end, which has the score
_WAIT_S = 30.0  # for another process that writes to the same file
_TABLES = """
CREATE TABLE IF NOT EXISTS answers (question BLOB PRIMARY KEY, answer TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS spent (reward TEXT PRIMARY KEY, requests INTEGER NOT NULL, tokens INTEGER NOT NULL);
"""
_SPEND = """
INSERT INTO spent VALUES (?, ?, ?)
ON CONFLICT (reward) DO UPDATE SET requests = requests + excluded.requests, tokens = tokens + excluded.tokens
"""
T = TypeVar("T")


class JudgeStore:
    """One file, used from one thread of its own. Several processes may share it on a local disk.

    Writes survive the end of the process. Those of the last moments may be lost with the machine.
    """

    def __init__(self, path: Path | None) -> None:
        """`path` None: in memory, for as long as this process runs."""
        self._thread = ThreadPoolExecutor(1, "judge-store")
        try:
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
            self._file = sqlite3.connect(
                ":memory:" if path is None else path, timeout=_WAIT_S, isolation_level=None, check_same_thread=False
            )
            self._file.execute("PRAGMA journal_mode = WAL")
            self._file.execute("PRAGMA synchronous = NORMAL")
            self._file.executescript(_TABLES)
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(
                f"the judge's file {path} cannot be used: {error}", fix="name another file, or delete this one"
            ) from None

    async def answer(self, question: bytes) -> str | None:
        def find() -> str | None:
            row = self._file.execute("SELECT answer FROM answers WHERE question = ?", (question,)).fetchone()
            return None if row is None else str(row[0])

        return await self._run(find)

    async def keep(self, question: bytes, answer: str) -> None:
        row = (question, answer[-MAX_KEPT_CHARS:])
        await self._run(lambda: self._file.execute("INSERT OR REPLACE INTO answers VALUES (?, ?)", row))

    def spent(self, reward: str) -> tuple[int, int]:
        """Requests and tokens of a reward, in this run."""
        row = self._file.execute("SELECT requests, tokens FROM spent WHERE reward = ?", (reward,)).fetchone()
        return (0, 0) if row is None else (int(row[0]), int(row[1]))

    async def spend(self, reward: str, *, requests: int, tokens: int) -> None:
        await self._run(lambda: self._file.execute(_SPEND, (reward, requests, tokens)))

    async def close(self) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, self._file.close)
        self._thread.shutdown(wait=False)

    async def _run(self, work: Callable[[], T]) -> T:
        try:
            # Shielded: what was begun is finished, also if the caller is cancelled.
            return await asyncio.shield(asyncio.get_running_loop().run_in_executor(self._thread, work))
        except sqlite3.Error as error:
            raise ScoringError(
                f"the judge's file cannot be read or written: {error}", fix="is its disk full? else name another file"
            ) from error
