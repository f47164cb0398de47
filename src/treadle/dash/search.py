"""Searching the text of the groups: one after the other, the newest first, for a second at a time.

A call says how far it came; the page calls again from there, and stops when its reader does.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import msgspec

from treadle.dash.rollouts import Lexicon, texts_of
from treadle.store.browse import Browser, GroupSummary, Wanted

BUDGET_S = 1.0
AT_ONCE = 100  # groups that are listed at once; their contents, which may be large, are opened one by one
EXCERPT_CHARS = 80


class Hit(msgspec.Struct, frozen=True):
    group: GroupSummary
    excerpt: str


class Found(msgspec.Struct, frozen=True, kw_only=True):
    hits: list[Hit]
    num_searched: int
    num_without_text: int  # their content is no longer kept, or nobody knows the words of their tokens
    go_on_before: int | None  # None: all were searched


def search(
    browser: Browser,
    lexicon: Lexicon,
    wanted: Wanted,
    text: str,
    *,
    max_hits: int,
    clock: Callable[[], float] = time.monotonic,
) -> Found:
    until_s = clock() + BUDGET_S
    needle = text.casefold()
    hits: list[Hit] = []
    num_searched = num_without_text = 0
    is_over = is_enough = False
    while not (is_over or is_enough):
        page = browser.find(wanted, AT_ONCE)
        for group in page:
            num_searched += 1
            wanted = replace(wanted, before=group.id)
            stored = browser.contents([group.id]).get(group.id)
            texts = texts_of(stored, lexicon) if stored is not None else []
            num_without_text += not texts
            excerpt = _excerpt(texts, needle)
            if excerpt is not None:
                hits.append(Hit(group, excerpt))
            is_enough = len(hits) == max_hits or clock() >= until_s
            if is_enough:
                break
        is_over = not is_enough and len(page) < AT_ONCE
    return Found(
        hits=hits,
        num_searched=num_searched,
        num_without_text=num_without_text,
        go_on_before=None if is_over else wanted.before,
    )


def _excerpt(texts: list[str], needle: str) -> str | None:
    """What stands around the first place; None: it is nowhere."""
    for text in texts:
        place = text.casefold().find(needle)
        if place >= 0:
            start = max(0, place - EXCERPT_CHARS // 2)
            return " ".join(text[start : place + len(needle) + EXCERPT_CHARS // 2].split())
    return None
