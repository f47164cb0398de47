"""A group as the page shows it: every token with its logprobs, its advantage and whether it is trained."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from treadle.store.browse import GroupSummary, content_of
from treadle.store.records import StoredGroup
from treadle.track.token_files import RolloutTokens
from treadle.wire import binary
from treadle.wire.groups import IGNORED, NO_LOGPROB, ScoredGroup, common_prefix

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# A browser draws each token as an element of its own.
MAX_TOKENS_SHOWN = 4_000  # of one rollout
MAX_GROUP_TOKENS_SHOWN = 60_000
MAX_ROLLOUTS_SHOWN = 256
WHOLE_CHARACTER = 4  # tokens that a character may be spread over, at most
BROKEN = "\ufffd"  # how a decoder writes a part of a character


class RolloutView(msgspec.Struct, frozen=True, kw_only=True):
    """One value for each token that is shown, unless it says otherwise."""

    score: float
    advantage: float  # its score minus the mean of its group
    num_tokens: int
    ids: list[int]
    pieces: list[str] | None  # None: no tokenizer is known
    is_trained: list[int]  # 1 or 0
    logprobs: list[float | None] | None
    advantages: list[float] | None  # where the environment sent them
    differences: list[float | None] | None  # trainer's logprob minus engine's; None: it carried no loss, or not kept
    trained_advantages: list[float] | None  # what it was trained with
    messages: list[dict[str, Any]] | None  # where there are no pieces
    details: dict[str, Any]  # from its environment: outcome, parts, finish_reason, ...


class GroupView(msgspec.Struct, frozen=True, kw_only=True):
    summary: GroupSummary
    env: str
    older: int | None
    newer: int | None
    rollouts: list[RolloutView] | None  # None: its content is no longer kept
    num_rollouts: int = 0  # of which so many are shown as a browser can bear
    prompt_tokens: int = 0  # shared by all its rollouts
    has_record: bool = False  # whether the trainer's figures of its step are kept
    generation_params: dict[str, Any] | None = None


class Lexicon:
    """Token ids as text, by the tokenizer of the run's model, which is loaded when it is first needed."""

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
            from tokenizers import Tokenizer  # half a hub's start: only when text is asked for

            try:
                self._tokenizer = Tokenizer.from_file(str(self._file))
            except Exception:  # the library raises plain Exception; the page then shows the ids and says so
                self._file = None
        return self._tokenizer


def _whole_characters(ids: Sequence[int], pieces: list[str], tokenizer: Tokenizer) -> list[str]:
    """A character whose bytes are spread over several tokens stands at the first of them, and nothing at the others."""
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
    return binary.from_stored(content_of(stored))


def view_rollouts(
    group: ScoredGroup, lexicon: Lexicon, recorded: Mapping[int, RolloutTokens] | None = None
) -> list[RolloutView]:
    """`recorded`: what the trainer kept of them; None: nothing is kept of their step."""
    mean = sum(group.scores) / len(group.scores)
    rows = range(min(group.size, MAX_ROLLOUTS_SHOWN))
    shown = slice(min(MAX_TOKENS_SHOWN, MAX_GROUP_TOKENS_SHOWN // len(rows)))
    return [_view(group, row, mean, lexicon, shown, recorded) for row in rows]


def _view(
    group: ScoredGroup,
    row: int,
    mean: float,
    lexicon: Lexicon,
    shown: slice,
    recorded: Mapping[int, RolloutTokens] | None,
) -> RolloutView:
    ids = group.tokens[row][shown]
    pieces = lexicon.pieces(ids)
    details = dict(group.overrides[row]) if group.overrides else {}
    logprobs = _at(group.inference_logprobs, row)
    own = _at(group.advantages, row)
    teaches = not details.get("set_advantage_to_zero")
    differences, trained_advantages = _as_trained(recorded, row, len(ids))
    return RolloutView(
        score=group.scores[row],
        advantage=(group.scores[row] - mean) if teaches else 0.0,
        num_tokens=len(group.tokens[row]),
        ids=ids,
        pieces=pieces,
        is_trained=[int(mask != IGNORED) for mask in group.masks[row][shown]],
        logprobs=None if logprobs is None else [_logprob(value) for value in logprobs[shown]],
        advantages=own[shown] if own is not None and len(own) == len(group.tokens[row]) else None,
        differences=differences,
        trained_advantages=trained_advantages,
        messages=_at(group.messages, row) if pieces is None else None,
        details=details,
    )


def _at(rows: Sequence[Any] | None, row: int) -> Any:
    """None also where a client sent fewer than there are rollouts, which is its right."""
    return rows[row] if rows is not None and row < len(rows) else None


def _as_trained(
    recorded: Mapping[int, RolloutTokens] | None, row: int, num_shown: int
) -> tuple[list[float | None] | None, list[float] | None]:
    """Difference and advantage of each token that is shown; a token that carried no loss has no advantage."""
    if recorded is None:
        return None, None
    differences: list[float | None] = [None] * num_shown
    advantages = [0.0] * num_shown
    for place, difference, advantage in recorded[row].figures() if row in recorded else ():
        if place < num_shown:
            differences[place] = None if math.isnan(difference) else round(difference, 4)
            advantages[place] = round(advantage, 4)
    return differences, advantages


def _logprob(value: float) -> float | None:
    return None if value == NO_LOGPROB else round(value, 4)


def num_prompt_tokens(group: ScoredGroup) -> int:
    """How many leading tokens all rollouts share, none of which is trained."""
    first_trained = [
        next((row for row, mask in enumerate(masks) if mask != IGNORED), len(masks)) for masks in group.masks
    ]
    return min(common_prefix(group.tokens), *first_trained)


def texts_of(stored: StoredGroup, lexicon: Lexicon) -> list[str]:
    """Everything that was said in a group, for a search."""
    group = open_group(stored)
    if group.messages:
        return [str(message.get("content", "")) for turns in group.messages for message in turns]
    texts = [lexicon.text(tokens) for tokens in group.tokens]
    return [text for text in texts if text is not None]
