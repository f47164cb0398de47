"""Run work concurrently with results in order, and show its progress."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TextIO, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

T = TypeVar("T")
R = TypeVar("R")
ReportProgress = Callable[[int, str], None]  # number of finished items, and a short note

ROLLOUTS_AT_ONCE = 128  # the default number of sequences that an engine generates concurrently
_PLAIN_LINE_EVERY_S = 5.0


def groups_at_once(num_rollouts: int, rollouts_at_once: int = ROLLOUTS_AT_ONCE) -> int:
    """How many groups of `num_rollouts` keep an engine busy."""
    return max(1, rollouts_at_once // num_rollouts)


async def in_order(work: Callable[[T], Awaitable[R]], items: Iterable[T], *, at_once: int) -> AsyncGenerator[R, None]:
    """The results in the order of `items`, with `at_once` concurrent calls. The first failure cancels the rest.

    Close it (`contextlib.aclosing`) to cancel running calls.
    """
    free = asyncio.Semaphore(at_once)

    async def one(item: T) -> R:
        async with free:
            return await work(item)

    tasks = [asyncio.ensure_future(one(item)) for item in items]
    try:
        for task in tasks:
            yield await task
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@contextmanager
def show_progress(title: str, total: int, *, file: TextIO | None = None) -> Iterator[ReportProgress]:
    """A progress bar on a terminal, else a plain line every few seconds; on standard error by default."""
    console = Console(file=file, stderr=file is None)
    if not console.is_terminal:
        last_printed = time.monotonic()

        def print_line(num_done: int, note: str) -> None:
            nonlocal last_printed
            if num_done == total or time.monotonic() - last_printed >= _PLAIN_LINE_EVERY_S:
                last_printed = time.monotonic()
                console.out(f"{title}: {num_done} of {total}, {note}", highlight=False)

        yield print_line
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[note]}"))
    with Progress(*columns, TimeElapsedColumn(), console=console) as bar:
        task = bar.add_task(title, total=total, note="")
        yield lambda num_done, note: bar.update(task, completed=num_done, note=note)
