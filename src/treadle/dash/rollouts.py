"""Prepare groups for the page (every token with its text, logprobs and advantage), and search their text.

A search call runs for a second, newest group first, and returns where to continue; the page repeats the call.
GroupIndexer reads what a list of groups shows, in the background.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from treadle.log import get_logger
from treadle.store.browse import Browser, GroupFilter, GroupSummary
from treadle.store.records import ReadFailed, StoredGroup
from treadle.track.files import RolloutTokens, TokenFiles
from treadle.wire.groups import IGNORED, NO_LOGPROB, ScoredGroup, common_prefix, fingerprint, from_stored

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# A browser draws each token as an element of its own.
MAX_TOKENS_SHOWN = 4_000  # of one rollout
MAX_GROUP_TOKENS_SHOWN = 60_000
MAX_ROLLOUTS_SHOWN = 256
WHOLE_CHARACTER = 4  # most tokens that one character spreads over
BROKEN = "\ufffd"  # a decoder's output for part of a character


class RolloutView(msgspec.Struct, frozen=True, kw_only=True):
    """Lists hold one value per token that is shown."""

    score: float | None  # None: it could not be scored
    advantage: float  # score minus the mean of the group
    num_tokens: int
    num_trained: int
    ids: list[int] | None
    pieces: list[str] | None  # None: no tokenizer was found
    is_trained: list[int]  # 1 or 0
    logprobs: list[float | None] | None
    advantages: list[float] | None  # as sent by the environment
    differences: list[float | None] | None  # trainer's logprob minus engine's; None: no loss, or not kept
    trained_advantages: list[float] | None  # as used by the trainer
    messages: list[dict[str, Any]] | None  # shown where there are no pieces
    details: dict[str, Any]  # from its environment: outcome, parts, finish_reason, ...


class GroupView(msgspec.Struct, frozen=True, kw_only=True):
    summary: GroupSummary
    env: str
    older: int | None
    newer: int | None
    rollouts: list[RolloutView] | None  # None: the content is no longer kept
    num_rollouts: int = 0  # in the group; at most MAX_ROLLOUTS_SHOWN are shown
    prompt_tokens: int = 0  # leading tokens that all rollouts share
    has_record: bool = False  # whether the trainer's figures of the step are kept
    generation_params: dict[str, Any] | None = None
    prompt: list[dict[str, Any]] | None = None  # messages, where rollouts hold only what follows them
    answer: str = ""  # expected


class TokenDecoder:
    """Decodes token ids with the tokenizer of the run's model, which is loaded on first use."""

    def __init__(self, model_folder: Path | None) -> None:
        self._file = None if model_folder is None else model_folder / "tokenizer.json"
        self._lock = threading.Lock()
        self._tokenizer: Tokenizer | None = None
        self._pieces: dict[int, str] = {}

    def pieces(self, ids: Sequence[int]) -> list[str] | None:
        with self._lock:
            tokenizer = self._load()
            if tokenizer is None:
                return None
            known = self._pieces
            for token in set(ids) - known.keys():
                known[token] = tokenizer.decode([token], skip_special_tokens=False)
            return _whole_characters(ids, [known[token] for token in ids], tokenizer)

    def text(self, ids: Sequence[int]) -> str | None:
        with self._lock:
            tokenizer = self._load()
            return None if tokenizer is None else tokenizer.decode(list(ids), skip_special_tokens=False)

    def _load(self) -> Tokenizer | None:
        if self._tokenizer is None and self._file is not None:
            from tokenizers import Tokenizer  # slow to import: half of a hub's start-up time

            try:
                self._tokenizer = Tokenizer.from_file(str(self._file))
            except Exception:  # the library raises plain Exception; the page then shows token ids
                self._file = None
        return self._tokenizer


def _whole_characters(ids: Sequence[int], pieces: list[str], tokenizer: Tokenizer) -> list[str]:
    """Give a character that is spread over several tokens to the first of them; the others get ""."""
    row = 0
    while row < len(pieces):
        if BROKEN in pieces[row]:
            for end in range(row + 2, min(row + WHOLE_CHARACTER, len(pieces)) + 1):
                text = tokenizer.decode(list(ids[row:end]), skip_special_tokens=False)
                if BROKEN not in text:
                    pieces[row:end] = [text, *[""] * (end - row - 1)]
                    row = end - 1
                    break
        row += 1
    return pieces


def open_group(stored: StoredGroup) -> ScoredGroup:
    return from_stored(stored.content())


def view_group(
    summary: GroupSummary,
    stored: StoredGroup | None,
    decoder: TokenDecoder,
    tokens: TokenFiles | None,
    *,
    env: str,
    older: int | None = None,
    newer: int | None = None,
) -> GroupView:
    """`stored`: its content, None if no longer kept. `tokens`: the trainer's figures of the run, if any."""
    if stored is None:
        return GroupView(summary=summary, env=env, older=older, newer=newer, rollouts=None)
    group = open_group(stored)
    recorded = None
    if tokens is not None and summary.step is not None and summary.state in ("leased", "trained"):
        recorded = tokens.of_group(summary.step, fingerprint(group))
    return GroupView(
        summary=summary,
        env=env,
        older=older,
        newer=newer,
        rollouts=view_rollouts(group, decoder, recorded),
        num_rollouts=group.size,
        prompt_tokens=num_prompt_tokens(group),
        has_record=recorded is not None,
        generation_params=group.generation_params,
    )


def view_rollouts(
    group: ScoredGroup, decoder: TokenDecoder, recorded: Mapping[int, RolloutTokens] | None = None
) -> list[RolloutView]:
    """`recorded`: the trainer's figures by rollout; None: not kept for the step."""
    mean = sum(group.scores) / len(group.scores)
    rows = range(min(group.size, MAX_ROLLOUTS_SHOWN))
    shown = slice(min(MAX_TOKENS_SHOWN, MAX_GROUP_TOKENS_SHOWN // len(rows)))
    return [_view(group, row, mean, decoder, shown, recorded) for row in rows]


def _view(
    group: ScoredGroup,
    row: int,
    mean: float,
    decoder: TokenDecoder,
    shown: slice,
    recorded: Mapping[int, RolloutTokens] | None,
) -> RolloutView:
    ids = group.tokens[row][shown]
    pieces = decoder.pieces(ids)
    details = dict(group.overrides[row]) if group.overrides else {}
    logprobs = _at(group.inference_logprobs, row)
    own = _at(group.advantages, row)
    teaches = not details.get("set_advantage_to_zero")
    differences, trained_advantages = _as_trained(recorded, row, len(ids))
    return RolloutView(
        score=group.scores[row],
        advantage=(group.scores[row] - mean) if teaches else 0.0,
        num_tokens=len(group.tokens[row]),
        num_trained=sum(mask != IGNORED for mask in group.masks[row]),
        ids=ids,
        pieces=pieces,
        is_trained=[int(mask != IGNORED) for mask in group.masks[row][shown]],
        logprobs=logprobs and [None if value == NO_LOGPROB else round(value, 4) for value in logprobs[shown]],
        advantages=own[shown] if own is not None and len(own) == len(group.tokens[row]) else None,
        differences=differences,
        trained_advantages=trained_advantages,
        messages=_at(group.messages, row) if pieces is None else None,
        details=details,
    )


def _at(rows: Sequence[Any] | None, row: int) -> Any:
    """None also where a client sent fewer rows than rollouts, which the protocol allows."""
    return rows[row] if rows is not None and row < len(rows) else None


def _as_trained(
    recorded: Mapping[int, RolloutTokens] | None, row: int, num_shown: int
) -> tuple[list[float | None] | None, list[float] | None]:
    """Difference and advantage of each shown token; a token without loss has advantage 0."""
    if recorded is None:
        return None, None
    differences: list[float | None] = [None] * num_shown
    advantages = [0.0] * num_shown
    for place, difference, advantage in recorded[row].figures() if row in recorded else ():
        if place < num_shown:
            differences[place] = None if math.isnan(difference) else round(difference, 4)
            advantages[place] = round(advantage, 4)
    return differences, advantages


def num_prompt_tokens(group: ScoredGroup) -> int:
    """Number of leading, untrained tokens that all rollouts share."""
    first_trained = [
        next((row for row, mask in enumerate(masks) if mask != IGNORED), len(masks)) for masks in group.masks
    ]
    return min(common_prefix(group.tokens), *first_trained)


def texts_of(stored: StoredGroup, decoder: TokenDecoder) -> list[str]:
    """The texts of a group, for a search."""
    group = open_group(stored)
    if group.messages:
        return [str(message.get("content", "")) for turns in group.messages for message in turns]
    texts = [decoder.text(tokens) for tokens in group.tokens]
    return [text for text in texts if text is not None]


# ---- search

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
            except (ReadFailed, msgspec.DecodeError):  # busy, reset or damaged: the next request wakes it again
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
    wanted: GroupFilter,
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
