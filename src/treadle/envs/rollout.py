"""Sample and score the rollouts of an item, and build the group to send from them.

A rollout is one completion, or a coroutine of several turns. Score adjustments, the decision to drop a group, and its
construction are pure. `in_order` and `show_progress` run many items concurrently.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, TextIO, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from treadle.config.env import EnvConfig
from treadle.envs.base import Environment, Item, Score
from treadle.envs.chat import Model, RolloutSampling, Transcript
from treadle.envs.chat_format import ChatTokenizer
from treadle.envs.engine_client import EngineResult, all_together
from treadle.envs.engine_pool import InferenceClient
from treadle.envs.scoring import ScoreRules, as_score
from treadle.errors import ConfigError, EngineError, RequestError, ScoringError, UserError
from treadle.wire.groups import ScoredGroup

# How the scores of a group compare. "all_right", "all_wrong" and "equal": they are all the same, and teach nothing.
Scores = Literal["differ", "all_right", "all_wrong", "equal", "none"]


@dataclass(frozen=True)
class Rollout:
    """One attempt of the policy at an item, and its score."""

    transcripts: list[Transcript]  # all of them are trained on
    score: Score
    seconds: float  # time of the engine; rollouts of a group are generated concurrently
    text: str = ""  # the last completion

    @property
    def num_sampled(self) -> int:
        return sum(transcript.num_sampled for transcript in self.transcripts)

    @property
    def is_truncated(self) -> bool:
        return any(transcript.finish_reason == "length" for transcript in self.transcripts)


@dataclass(frozen=True)
class EnvContext:
    """Everything that an environment process needs for sampling and scoring; created once at its start."""

    environment: Environment
    engine: InferenceClient
    tokenizer: ChatTokenizer
    judge: ScoreRules

    @property
    def config(self) -> EnvConfig:
        return self.environment.config

    @property
    def name(self) -> str:
        """The name of this environment at the hub; a restarted process resumes by it."""
        return self.config.wandb_name or self.config.own_name


async def roll_group(context: EnvContext, item: Item, sampling: RolloutSampling, *, num_rollouts: int) -> list[Rollout]:
    """Sample and score `num_rollouts` rollouts of one item."""
    if context.environment.has_turns:
        return await _roll_turns(context, item, sampling, num_rollouts)
    prompt = context.tokenizer.encode_chat(item.messages)
    check_lengths([prompt], sampling.max_tokens, sampling.longest_sequence)
    generation = await context.engine.generate(
        prompt,
        n=num_rollouts,
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        seed=sampling.seed,
    )
    return await score_generation(context, item, prompt, generation)


async def score_generation(
    context: EnvContext, item: Item, prompt: Sequence[int], generation: EngineResult
) -> list[Rollout]:
    """One rollout per completion: every sampled token is trained on, the prompt is not."""
    scores = await context.judge.scores(item, generation.completions)
    rollouts = []
    for completion, score in zip(generation.completions, scores, strict=True):
        transcript = Transcript(messages=[*item.messages, {"role": "assistant", "content": completion.text}])
        transcript.read(prompt)
        transcript.wrote(completion)
        rollouts.append(Rollout([transcript], score, generation.seconds, completion.text))
    return rollouts


async def _roll_turns(context: EnvContext, item: Item, sampling: RolloutSampling, num_rollouts: int) -> list[Rollout]:
    """Run the rollouts concurrently. If one fails because the engine is gone, the others are cancelled."""
    seeds: list[int | None] = [None] * num_rollouts
    if sampling.seed is not None:
        # The seeds of a rollout's turns increase by 1. They must not overlap with those of the next rollout.
        seeds = [(sampling.seed + number * 2**20) % 2**63 for number in range(num_rollouts)]
    return await all_together(roll_one(context, item, replace(sampling, seed=seed)) for seed in seeds)


async def roll_one(context: EnvContext, item: Item, sampling: RolloutSampling) -> Rollout:
    model = Model(context.engine, context.tokenizer, sampling)
    try:
        given = await context.environment.rollout(item, model)
        if given is not None:
            score = as_score(given, context.config.right)
        elif model.last_completion is not None:
            (score,) = await context.judge.scores(item, [model.last_completion])
        else:
            raise ValueError("the rollout asked the model nothing, and gave no score")
    except RequestError as error:  # an invalid request: an error of the user code, in this rollout
        score = context.judge.failed("rollout_failed", item, "", error)
    except (EngineError, UserError, ScoringError):  # the engine, a setting or the judge: concerns all rollouts
        raise
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        score = context.judge.failed("rollout_failed", item, "", error)  # the user code cancelled itself
    except (Exception, SystemExit) as error:  # user code
        score = context.judge.failed("rollout_failed", item, "", error)
    last = model.last_completion
    return Rollout(model.transcripts, score, model.seconds, "" if last is None else last.text)


def check_lengths(prompts: Sequence[Sequence[int]], max_tokens: int, longest_sequence: int) -> None:
    """Refuse sequences that are too long for the trainer before they are sampled; 0 or less is no limit."""
    longest_prompt = max(map(len, prompts))
    if 0 < longest_sequence < longest_prompt + max_tokens:
        raise ConfigError(
            f"a prompt of {longest_prompt} tokens and a completion of up to {max_tokens} do not fit into the "
            f"trainer's sequences of {longest_sequence} tokens",
            fix="lower --env.max-token-length or raise --train.seq-len",
        )


# ---- groups (pure)


def with_length_penalty(rollouts: Sequence[Rollout], max_tokens: int) -> list[Rollout]:
    """If all rollouts are right, scale their rewards down with length; a group with a wrong one is not changed.

    The factor is 1 up to half of `max_tokens` sampled tokens, then decreases linearly to 0 at `max_tokens`. Unscored
    rollouts are ignored.
    """
    scored = [rollout for rollout in rollouts if rollout.score.reward is not None]
    if not scored or not all(rollout.score.is_right for rollout in scored):
        return list(rollouts)
    scaled = []
    for rollout in rollouts:
        share, reward = min(1.0, max(0.0, 2 * (1 - rollout.num_sampled / max_tokens))), rollout.score.reward
        # A negative reward must not improve with length.
        reward = None if reward is None else min(reward, reward * share)
        scaled.append(replace(rollout, score=replace(rollout.score, reward=reward)))
    return scaled


def without_short(rollouts: Sequence[Rollout], min_tokens: int) -> list[Rollout]:
    """Remove the scores of rollouts with fewer sampled tokens; they stay in the group to keep its size."""
    why = f"fewer than {min_tokens} sampled tokens"
    return [
        rollout
        if rollout.num_sampled >= min_tokens or rollout.score.reward is None  # an unscored one already has a reason
        else replace(rollout, score=replace(rollout.score, reward=None, outcome="too_short", error=why))
        for rollout in rollouts
    ]


def apply_group_rules(environment: Environment, rollouts: Sequence[Rollout]) -> list[Rollout]:
    """Apply the environment's minimum length and length penalty."""
    adjusted = without_short(rollouts, environment.min_trained_tokens)
    config = environment.config
    return with_length_penalty(adjusted, config.max_token_length) if config.length_penalty else adjusted


def drop_reason(rollouts: Sequence[Rollout], *, drop_equal_scores: bool) -> str | None:
    """Why a group is not worth sending: "unscored", "nothing_sampled" or "equal_scores"; None: send it."""
    sampled = [rollout for rollout in rollouts if rollout.num_sampled]
    if not sampled:
        return "nothing_sampled"
    scores = compare_scores(sampled)
    if scores == "none":
        return "unscored"
    return "equal_scores" if drop_equal_scores and scores != "differ" else None


def compare_scores(rollouts: Sequence[Rollout]) -> Scores:
    """ "equal": the same score, but neither all right nor all wrong."""
    scored = [rollout.score for rollout in rollouts if rollout.num_sampled and rollout.score.reward is not None]
    if not scored:
        return "none"
    if len({score.reward for score in scored}) > 1:
        return "differ"
    if all(score.is_right for score in scored):
        return "all_right"
    return "equal" if any(score.is_right for score in scored) else "all_wrong"


def build_group(
    rollouts: Sequence[Rollout], *, temperature: float, source: str = "", sources: Sequence[str] = ()
) -> ScoredGroup:
    """Every transcript becomes a sequence with its rollout's score. `source`: that of the item, among the `sources` of
    its environment.

    An unscored rollout stays in the group to keep its size, but is not trained on: it gets the mean of the others,
    which leaves the group's mean unchanged, and its advantage is set to zero.
    """
    scored = [rollout.score.reward for rollout in rollouts if rollout.score.reward is not None]
    mean = sum(scored) / len(scored) if scored else 0.0  # a wave keeps groups without scores
    pairs = [(rollout, transcript) for rollout in rollouts for transcript in rollout.transcripts]
    overrides = [_overrides(rollout, transcript) for rollout, transcript in pairs]
    return ScoredGroup(
        tokens=[transcript.tokens for _, transcript in pairs],
        masks=[transcript.masks for _, transcript in pairs],
        scores=[mean if rollout.score.reward is None else rollout.score.reward for rollout, _ in pairs],
        inference_logprobs=[transcript.logprobs for _, transcript in pairs],
        messages=[transcript.messages for _, transcript in pairs],
        generation_params={"temperature": temperature},
        overrides=overrides if any(overrides) else None,
        policy_version=min(version for _, transcript in pairs for version in transcript.policy_versions),
        metrics=_metrics(rollouts) | source_metrics(source, sources, rollouts),
    )


def source_metrics(source: str, sources: Sequence[str], rollouts: Sequence[Rollout]) -> dict[str, float]:
    """The score and accuracy of a group by its data source, and for each source whether it is this one: averaged over a
    batch, its share."""
    if not source:
        return {}
    scores = [rollout.score.reward for rollout in rollouts if rollout.score.reward is not None]
    mean = {f"source/{source}/score": sum(scores) / len(scores)} if scores else {}
    return {
        **mean,
        f"source/{source}/accuracy": sum(rollout.score.is_right for rollout in rollouts) / len(rollouts),
        **{f"source/{name}/share": float(name == source) for name in sources},
    }


def _overrides(rollout: Rollout, transcript: Transcript) -> dict[str, Any]:
    """Per-sequence data for the trainer (truncation, temperature, zero advantage) and for display."""
    found: dict[str, Any] = {"finish_reason": "length"} if transcript.finish_reason == "length" else {}
    if rollout.score.parts:
        found |= {"parts": dict(rollout.score.parts), "outcome": rollout.score.outcome}
    if len(set(transcript.policy_versions)) > 1:
        found["policy_versions"] = sorted(set(transcript.policy_versions))
    if transcript.temperature is not None:
        found["temperature"] = transcript.temperature
    if rollout.score.reward is None:
        found |= {"set_advantage_to_zero": True, "outcome": rollout.score.outcome, "error": rollout.score.error}
    return found


def _metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    count = len(rollouts)
    metrics = {
        "accuracy": sum(rollout.score.is_right for rollout in rollouts) / count,
        "generation_s": max(rollout.seconds for rollout in rollouts),  # they are generated concurrently
        "score_s": sum(rollout.score.seconds for rollout in rollouts),
        "generated_tokens": float(sum(rollout.num_sampled for rollout in rollouts)),
        "truncated": sum(rollout.is_truncated for rollout in rollouts) / count,
    }
    for name in sorted({name for rollout in rollouts for name in rollout.score.parts}):
        worths = [rollout.score.parts[name] for rollout in rollouts if name in rollout.score.parts]
        metrics[f"reward/{name}"] = sum(worths) / len(worths)
    for rollout in rollouts:
        for name, value in rollout.score.metrics.items():
            metrics[name] = metrics.get(name, 0.0) + value
    failures = Counter(rollout.score.outcome for rollout in rollouts if rollout.score.reward is None)
    for outcome, times in failures.items():
        metrics[f"score_{outcome}"] = float(times)
    num_errors = failures.total() - failures["too_short"]
    if num_errors:
        metrics["score_errors"] = float(num_errors)
    return metrics


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
