"""Export the groups of a file as one HTML page, with the rollout viewer of the dash.

`python -m treadle.envs.page data/arithmetic.jsonl` writes it again, for example after a process was killed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from treadle.dash.charts import Series
from treadle.dash.export import export_page, group_answers, write_export
from treadle.dash.rollouts import GroupView, RolloutView, TokenDecoder, num_prompt_tokens, view_rollouts
from treadle.envs.group_file import Verdict, WrittenGroup, read_group_file
from treadle.errors import TreadleError
from treadle.store.browse import PREVIEW_CHARS, GroupSummary

# Beyond this the tokens' colours are left out, so that a browser still opens the page at once.
MAX_COLOURED_TOKENS = 2_000_000


def write_page(groups_file: Path, page_file: Path) -> None:
    write_export(page_file, groups_file.name, page_answers(groups_file.name, read_group_file(groups_file)))


def render_page(title: str, groups: Iterable[WrittenGroup]) -> str:
    return export_page(title, page_answers(title, groups))


def page_answers(title: str, groups: Iterable[WrittenGroup]) -> dict[str, Any]:
    """What the page would request from a hub (dash/export.py)."""
    views = []
    num_tokens = 0
    for number, group in enumerate(groups, start=1):
        num_tokens += sum(map(len, group.pieces))
        views.append(view_group(group, number, coloured=num_tokens <= MAX_COLOURED_TOKENS))
    num_rollouts = sum(view.num_rollouts for view in views)
    uncoloured = "" if num_tokens <= MAX_COLOURED_TOKENS else "; too many tokens to colour them all"
    return {
        "kind": "groups",
        "tabs": ["rollouts"],
        "run": {"name": title, "model": "", "env": "", "charts": [], "meanings": {}, "others": [], "envs": [],
                "states": []},
        "series": Series(),
        "now": {"standing": "", "words": [f"{len(views)} groups, {num_rollouts} rollouts{uncoloured}"], "tiles": [],
                "sampling_note": "", "health": [], "queued": {"groups": 0, "sequences": 0}},
        **group_answers(views),
    }  # fmt: skip


def view_group(group: WrittenGroup, number: int, *, coloured: bool) -> GroupView:
    conversations = group.messages or []
    prompt = _shared_prompt(conversations)
    scores = [_score_of(group, place) for place in range(len(group.tokens))]
    known = [score for score in scores if score is not None]
    mean = sum(known) / len(known) if known else None
    lengths = [sum(token >= 0 for token in mask) for mask in group.masks]
    question = _text_of(prompt[-1]) if prompt else ""
    summary = GroupSummary(
        id=number,
        state="",
        env_id=None,
        size=len(scores),
        num_tokens=sum(map(len, group.tokens)),
        num_bytes=0,
        policy_version=group.policy_version,
        item=group.item,
        received_at=0.0,
        aside_reason=None,
        metrics=msgspec.Raw(msgspec.json.encode(group.metrics)) if group.metrics else None,
        score=mean,
        score_low=min(known, default=None),
        score_high=max(known, default=None),
        shortest=min(lengths, default=None),
        longest=max(lengths, default=None),
        prompt=" ".join(question.split())[:PREVIEW_CHARS],
        step=None,
    )
    return GroupView(
        summary=summary,
        env="",
        older=None,
        newer=None,
        rollouts=[
            _view_sequence(group, place, messages[len(prompt) :], mean or 0.0, coloured=coloured)
            for place, messages in enumerate(conversations)
        ]
        if conversations
        else view_rollouts(group, TokenDecoder(None)),
        num_rollouts=len(scores),
        prompt_tokens=0 if conversations else num_prompt_tokens(group),
        generation_params=group.generation_params,
        prompt=[{"role": str(message.get("role")), "content": _text_of(message)} for message in prompt] or None,
        answer=group.answer,
    )


def _shared_prompt(conversations: Sequence[Sequence[dict[str, Any]]]) -> Sequence[dict[str, Any]]:
    """The messages before the first of an assistant, as far as all sequences share them."""
    first = conversations[0] if conversations else []
    for count, message in enumerate(first):
        if message.get("role") == "assistant" or any(other[count : count + 1] != [message] for other in conversations):
            return first[:count]
    return first


def _score_of(group: WrittenGroup, place: int) -> float | None:
    return group.verdicts[place].reward if place < len(group.verdicts) else group.scores[place]


def _view_sequence(
    group: WrittenGroup, place: int, messages: Sequence[dict[str, Any]], mean: float, *, coloured: bool
) -> RolloutView:
    """The text of each sampled token with its logprob; every other message is one piece without a logprob."""
    score = _score_of(group, place)
    turns: list[list[tuple[str, float]]] = []
    if coloured and place < len(group.pieces) and group.inference_logprobs:
        turns = list(_turns(group.masks[place], group.pieces[place], group.inference_logprobs[place]))
    shown = list(_pieces(messages, turns))
    return RolloutView(
        score=score,
        advantage=0.0 if score is None else score - mean,
        num_tokens=len(group.tokens[place]),
        num_trained=sum(token >= 0 for token in group.masks[place]),
        ids=None,
        pieces=[piece for piece, _, _ in shown],
        is_trained=[int(is_sampled) for _, _, is_sampled in shown],
        logprobs=[logprob for _, logprob, _ in shown],
        advantages=None,
        differences=None,
        trained_advantages=None,
        messages=None,
        details=_details(group.verdicts[place]) if place < len(group.verdicts) else {},
    )


def _details(verdict: Verdict) -> dict[str, Any]:
    details = {"rollout": verdict.rollout, "is_right": verdict.is_right, "parts": verdict.parts}
    if verdict.reward is None:
        details |= {"outcome": verdict.outcome, "error": verdict.error}
    return details | {"finish_reason": verdict.finish_reason}


def _text_of(message: dict[str, Any]) -> str:
    content = message.get("content")
    text = content if isinstance(content, str) else msgspec.json.encode(content).decode()
    return text + msgspec.json.encode(message["tool_calls"]).decode() if message.get("tool_calls") else text


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


def _pieces(
    messages: Sequence[dict[str, Any]], turns: Sequence[list[tuple[str, float]]]
) -> Iterator[tuple[str, float | None, bool]]:
    """(text, logprob, is sampled); the sampled turns belong to the last messages of the assistant."""
    replies = [place for place, message in enumerate(messages) if message.get("role") == "assistant"]
    sampled = dict(zip(reversed(replies), reversed(turns), strict=False))
    for place, message in enumerate(messages):
        text, turn = _text_of(message), sampled.get(place, [])
        if len(messages) > 1:
            yield f"{message.get('role')}: ", None, False
        if turn and "".join(piece for piece, _ in turn) == text:  # else the engine rendered it differently
            yield from ((piece, round(min(logprob, 0.0), 3), True) for piece, logprob in turn)
        else:
            yield text, None, place in replies
        if place + 1 < len(messages):
            yield "\n\n", None, False


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
