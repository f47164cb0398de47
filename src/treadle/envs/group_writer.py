"""Write groups to a file with an HTML page, without a hub (`treadle env NAME process`).

Groups are sampled concurrently and written in the order of their items, so the same seed and policy give the same file.
Groups with equal scores are written too.

`python -m treadle.envs.group_writer data/arithmetic.jsonl` writes the page of a file again, for example after a process
was killed. The page is the rollout viewer of the dash, exported as one file.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from treadle.config.env import EnvConfig, ServerConfig
from treadle.dash.charts import Series
from treadle.dash.export import group_answers, write_export
from treadle.dash.rollouts import GroupView, RolloutView, TokenDecoder, num_prompt_tokens, view_rollouts
from treadle.envs.base import Item, stable_seed
from treadle.envs.chat import RolloutSampling
from treadle.envs.engine_pool import open_engine
from treadle.envs.group_file import GroupFile, WrittenGroup, as_written, read_group_file
from treadle.envs.main import load_tokenizer, open_context, prepare_environment
from treadle.envs.rollout import (
    EnvContext,
    ReportProgress,
    Rollout,
    apply_group_rules,
    build_group,
    drop_reason,
    groups_at_once,
    in_order,
    roll_group,
    show_progress,
)
from treadle.errors import ConfigError, TreadleError
from treadle.net.client import RetryPolicy
from treadle.store.browse import PREVIEW_CHARS, GroupSummary

DEFAULT_NUM_GROUPS = 16
# Beyond this the tokens' colours are left out, so that a browser still opens the page at once.
MAX_COLOURED_TOKENS = 2_000_000


@dataclass
class WriteStats:
    """Statistics of the groups that were written."""

    num_groups: int = 0
    num_rollouts: int = 0
    num_right: int = 0
    num_tokens: int = 0
    rewards: list[float] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)
    first_error: str = ""  # of scoring
    started: float = field(default_factory=time.monotonic)
    seconds: float = 0.0  # until the last group

    def add(self, rollouts: Sequence[Rollout], reason_to_drop: str | None) -> None:
        self.seconds = time.monotonic() - self.started
        self.num_tokens += sum(rollout.num_sampled for rollout in rollouts)
        errors = (rollout.score.error or rollout.score.outcome for rollout in rollouts if rollout.score.reward is None)
        self.first_error = self.first_error or next(errors, "")
        if reason_to_drop is not None:
            self.dropped[reason_to_drop] += 1
            return
        self.num_groups += 1
        self.num_rollouts += len(rollouts)
        self.num_right += sum(rollout.score.is_right for rollout in rollouts)
        self.rewards += [rollout.score.reward for rollout in rollouts if rollout.score.reward is not None]

    @property
    def brief(self) -> str:
        mean = sum(self.rewards) / max(len(self.rewards), 1)
        right = self.num_right / max(self.num_rollouts, 1)
        speed = self.num_tokens / max(self.seconds, 1e-9)
        return f"mean score {mean:.3f}, {right:.1%} right, {speed:.0f} generated tokens/s"

    def summary(self) -> str:
        lines = [f"{self.num_groups} groups, {self.num_rollouts} rollouts: {self.brief}"]
        if not self.num_groups:
            lines = ["no group was fit to be written"]
        unscored = self.num_rollouts - len(self.rewards)
        if unscored:
            lines.append(f"  not scored: {unscored} of these rollouts; not right, and in no mean")
        if self.dropped:
            reasons = ", ".join(f"{reason}: {times}" for reason, times in self.dropped.items())
            lines.append(f"  dropped groups: {self.dropped.total()} ({reasons})")
        if self.first_error:
            lines.append(f"  the first that could not be scored: {self.first_error}")
        return "\n".join(lines)


async def write_groups(env: EnvConfig, server: ServerConfig) -> int:
    """`treadle env NAME process`; exit code 1 if no group was written."""
    environment = await prepare_environment(env)
    total = num_groups_to_write(environment.config)
    # A person waits for this command, so give up early if no engine runs.
    async with open_engine(server, retry_policy=RetryPolicy(give_up_after_s=5.0), hub_url=env.hub_url) as engine:
        tokenizer = await load_tokenizer(engine, server)
        async with open_context(environment, engine, tokenizer) as context:
            with GroupFile(groups_path(context.config)) as file:
                stats = WriteStats()
                try:
                    with show_progress("groups", total) as report_progress:
                        await write_all(context, file, total, stats, report_progress)
                finally:  # also after an interruption
                    _conclude(file, stats)
    return 0 if stats.num_groups else 1


def _conclude(file: GroupFile, stats: WriteStats) -> None:
    print(stats.summary())
    if not stats.num_groups:
        file.path.unlink()
        return
    print(f"written to {file.path}")
    write_page(file.path, file.page)
    print(f"to look at: {file.page}")


def num_groups_to_write(config: EnvConfig) -> int:
    if config.total_steps == -1:
        return DEFAULT_NUM_GROUPS
    if config.total_steps < 1:
        raise ConfigError(
            f"there is nothing to write: total_steps is {config.total_steps}",
            fix=f"pass --env.total-steps {DEFAULT_NUM_GROUPS}: the number of groups",
        )
    return config.total_steps


def groups_path(config: EnvConfig) -> Path:
    return config.data_path_to_save_groups or Path("data") / f"{config.own_name}.jsonl"


async def write_all(
    context: EnvContext, file: GroupFile, total: int, stats: WriteStats, report_progress: ReportProgress
) -> None:
    """Sample the groups of the first `total` items, and write them in order."""
    config = context.config
    sampling = RolloutSampling(config.max_token_length, config.temperature)

    async def roll(index: int) -> tuple[int, Item, list[Rollout]]:
        item = context.environment.train_item(index)
        own = replace(sampling, seed=stable_seed(config.seed, "process", index))
        return (
            index,
            item,
            apply_group_rules(
                context.environment, await roll_group(context, item, own, num_rollouts=config.group_size)
            ),
        )

    at_once = config.max_num_workers if config.max_num_workers > 0 else groups_at_once(config.group_size)
    async with aclosing(in_order(roll, range(total), at_once=at_once)) as arriving:
        async for index, item, rollouts in arriving:
            reason = drop_reason(rollouts, drop_equal_scores=False)
            if reason is None:
                sources = context.environment.sources
                group = build_group(rollouts, temperature=config.temperature, source=item.source, sources=sources)
                group.item = index
                file.write(as_written(group, item, rollouts, context.tokenizer.decode))
            stats.add(rollouts, reason)
            report_progress(stats.num_groups + stats.dropped.total(), stats.brief)


# ---- page


def write_page(groups_file: Path, page_file: Path) -> None:
    write_export(page_file, groups_file.name, page_answers(groups_file.name, read_group_file(groups_file)))


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
    details: dict[str, Any] = {}
    if place < len(group.verdicts):
        verdict = group.verdicts[place]
        details = {"rollout": verdict.rollout, "is_right": verdict.is_right, "parts": verdict.parts}
        if verdict.reward is None:
            details |= {"outcome": verdict.outcome, "error": verdict.error}
        details["finish_reason"] = verdict.finish_reason
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
        details=details,
    )


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
        sys.exit("usage: python -m treadle.envs.group_writer GROUPS.jsonl")
    source = Path(sys.argv[1])
    try:
        write_page(source, source.with_suffix(".html"))
    except (TreadleError, OSError) as error:
        sys.exit(str(error))
    sys.stdout.write(f"written to {source.with_suffix('.html')}\n")


if __name__ == "__main__":
    main()
