"""Search the text of groups, and index groups in the background.

A search call runs for a second, newest group first, and returns where to continue; the page repeats the call.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import msgspec

from treadle.dash.rollouts import TokenDecoder, texts_of
from treadle.log import get_logger
from treadle.store.browse import Browser, GroupSummary, Wanted

PORTION = 25  # groups indexed at once; a search waits for one portion at most
BUDGET_S = 1.0
AT_ONCE = 100  # groups listed at once; their contents, which may be large, are opened one by one
EXCERPT_CHARS = 80
log = get_logger("page")


class GroupIndexer:
    """Background indexer for group search. `first` runs once at the start, so that the first request need not wait."""

    def __init__(self, browser: Browser, first: Callable[[], object]) -> None:
        self._browser = browser
        self._first = first
        self._is_asked = threading.Event()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._work, name="page-indexer", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        self._is_asked.set()

    def close(self) -> None:
        self._is_over.set()
        self._is_asked.set()
        self._thread.join()

    def _work(self) -> None:
        try:
            self._first()
        except OSError:  # the request that needs the file reports it
            log.error("figures_not_read", exc_info=True)
        while self._is_asked.wait() and not self._is_over.is_set():
            self._is_asked.clear()
            try:
                while self._browser.learn(PORTION) and not self._is_over.is_set():
                    self._is_over.wait(0.0005)  # let other threads take the lock and the interpreter
            except (
                sqlite3.Error,
                msgspec.DecodeError,
            ):  # busy, being reset or damaged: the next request wakes it again
                log.error("facts_not_read", exc_info=True)


class SearchHit(msgspec.Struct, frozen=True):
    group: GroupSummary
    excerpt: str


class SearchResult(msgspec.Struct, frozen=True, kw_only=True):
    hits: list[SearchHit]
    num_searched: int
    num_without_text: int  # content no longer kept, or no tokenizer to decode it
    go_on_before: int | None  # None: all were searched


def search(
    browser: Browser,
    decoder: TokenDecoder,
    wanted: Wanted,
    text: str,
    *,
    max_hits: int,
    clock: Callable[[], float] = time.monotonic,
) -> SearchResult:
    until_s = clock() + BUDGET_S
    needle = text.casefold()
    hits: list[SearchHit] = []
    num_searched = num_without_text = 0
    is_over = is_enough = False
    while not (is_over or is_enough):
        page = browser.find(wanted, AT_ONCE)
        for group in page:
            num_searched += 1
            wanted = replace(wanted, before=group.id)
            stored = browser.contents([group.id]).get(group.id)
            texts = texts_of(stored, decoder) if stored is not None else []
            num_without_text += not texts
            excerpt = _excerpt(texts, needle)
            if excerpt is not None:
                hits.append(SearchHit(group, excerpt))
            is_enough = len(hits) == max_hits or clock() >= until_s
            if is_enough:
                break
        is_over = not is_enough and len(page) < AT_ONCE
    return SearchResult(
        hits=hits,
        num_searched=num_searched,
        num_without_text=num_without_text,
        go_on_before=None if is_over else wanted.before,
    )


def _excerpt(texts: list[str], needle: str) -> str | None:
    """The text around the first match; None: no match."""
    for text in texts:
        place = text.casefold().find(needle)
        if place >= 0:
            start = max(0, place - EXCERPT_CHARS // 2)
            return " ".join(text[start : place + len(needle) + EXCERPT_CHARS // 2].split())
    return None
