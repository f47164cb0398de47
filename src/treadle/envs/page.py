"""A page that shows the groups of a file: one HTML file that asks nothing of anybody.

`python -m treadle.envs.page data/arithmetic.jsonl` makes it again, for example after a process was killed.

What models wrote is not to be trusted. It goes into the page as JSON in which no character can end the script element,
the page's own script puts it on the screen as text only, and the page's policy lets no other script run, nor anything
be loaded or sent.
"""

from __future__ import annotations

import base64
import hashlib
import html
import math
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from treadle.envs.group_file import Verdict, WrittenGroup, read_group_file
from treadle.errors import TreadleError

_TEMPLATE = Path(__file__).with_name("page.html")
# Beyond this the tokens' colours are left out, so that a browser still opens the page at once.
MOST_COLOURED_TOKENS = 2_000_000


def write_page(groups_file: Path, page_file: Path) -> None:
    """Whole or not at all."""
    unfinished = page_file.with_suffix(f".tmp{os.getpid()}")
    unfinished.write_text(render_page(groups_file.name, read_group_file(groups_file)), encoding="utf-8")
    unfinished.replace(page_file)


def render_page(title: str, groups: Iterable[WrittenGroup]) -> str:
    shown = []
    num_tokens = 0
    for group in groups:
        num_tokens += sum(map(len, group.pieces))
        shown.append(_shown_group(group, coloured=num_tokens <= MOST_COLOURED_TOKENS))
    data = {"title": title, "groups": shown, "is_coloured": num_tokens <= MOST_COLOURED_TOKENS}
    template = _TEMPLATE.read_text(encoding="utf-8")
    script = re.search(r"<script>(.*?)</script>", template, re.DOTALL)
    assert script is not None  # noqa: S101 - the template is ours
    digest = base64.b64encode(hashlib.sha256(script[1].encode()).digest()).decode()
    filled = {"{{title}}": html.escape(title), "{{script_hash}}": f"sha256-{digest}", "{{data}}": embedded(data)}
    return re.sub("|".join(map(re.escape, filled)), lambda found: filled[found[0]], template)


def embedded(data: Any) -> str:
    """JSON that can stand in a script element: no tag, comment or entity begins in it, and no line ends in a string."""
    text = msgspec.json.encode(data).decode()
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")  # within strings only: JSON has them nowhere else
    return text


def _shown_group(group: WrittenGroup, *, coloured: bool) -> dict[str, Any]:
    conversations = group.messages or [[] for _ in group.tokens]
    prompt = _common_beginning(conversations)
    return {
        "item": group.item,
        "answer": group.answer,
        "version": group.policy_version,
        "prompt": [_shown_message(message) for message in prompt],
        "rollouts": [
            _shown_sequence(group, place, messages[len(prompt) :], coloured=coloured)
            for place, messages in enumerate(conversations)
        ],
    }


def _common_beginning(conversations: Sequence[Sequence[dict[str, Any]]]) -> Sequence[dict[str, Any]]:
    """The messages before the first that an assistant wrote, where all sequences begin alike."""
    first = conversations[0] if conversations else []
    for count, message in enumerate(first):
        if message.get("role") == "assistant" or any(other[count : count + 1] != [message] for other in conversations):
            return first[:count]
    return first


def _shown_sequence(
    group: WrittenGroup, place: int, messages: Sequence[dict[str, Any]], *, coloured: bool
) -> dict[str, Any]:
    verdict = group.verdicts[place] if place < len(group.verdicts) else None
    shown = [_shown_message(message) for message in messages]
    if coloured and place < len(group.pieces) and group.inference_logprobs:
        _add_tokens(shown, _turns(group.masks[place], group.pieces[place], group.inference_logprobs[place]))
    return {
        "score": group.scores[place] if verdict is None else verdict.reward,
        "num_tokens": sum(token >= 0 for token in group.masks[place]),
        "messages": shown,
        **({} if verdict is None else _shown_verdict(verdict)),
    }


def _shown_verdict(verdict: Verdict) -> dict[str, Any]:
    return {
        "rollout": verdict.rollout,
        "is_right": verdict.is_right,
        "parts": verdict.parts,
        "problem": "" if verdict.reward is not None else f"{verdict.outcome}: {verdict.error}",
        "is_cut_off": verdict.finish_reason == "length",
    }


def _shown_message(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    text = content if isinstance(content, str) else msgspec.json.encode(content).decode()
    if message.get("tool_calls"):
        text += msgspec.json.encode(message["tool_calls"]).decode()
    return {"role": str(message.get("role")), "text": text}


def _turns(mask: Sequence[int], pieces: Sequence[str], logprobs: Sequence[float]) -> Iterator[list[tuple[str, float]]]:
    """The sampled tokens of each turn, with their logprobs."""
    remaining = iter(pieces)
    turn: list[tuple[str, float]] = []
    for token, logprob in zip(mask, logprobs, strict=True):
        if token >= 0:
            turn.append((next(remaining, ""), logprob))
        elif turn:
            yield turn
            turn = []
    if turn:
        yield turn


def _add_tokens(messages: Sequence[dict[str, Any]], turns: Iterable[list[tuple[str, float]]]) -> None:
    """To what an assistant said: how long each token's text is, and how likely the token was, in percent."""
    spoken = [message for message in messages if message["role"] == "assistant"]
    sampled = list(turns)
    for message, turn in zip(reversed(spoken), reversed(sampled), strict=False):
        if "".join(piece for piece, _ in turn) == message["text"]:  # else the engine wrote it in another way
            message["lengths"] = [len(piece) for piece, _ in turn]
            message["percents"] = [round(100 * math.exp(min(logprob, 0.0))) for _, logprob in turn]


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("usage: python -m treadle.envs.page GROUPS.jsonl")
    source = Path(sys.argv[1])
    try:
        write_page(source, source.with_suffix(".html"))
    except (TreadleError, OSError) as error:
        sys.exit(str(error))
    sys.stdout.write(f"written to {source.with_suffix('.html')}\n")


if __name__ == "__main__":
    main()
