"""`treadle env NAME validate`: is the task fit to be trained on? Needs no model, hub or tokenizer."""

from __future__ import annotations

import asyncio
import logging
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from pydantic import PrivateAttr
from rich.console import Console

from treadle.config.env import DataOptions, EnvConfig
from treadle.envs.base import Environment, Item
from treadle.envs.catalogue import load_environment
from treadle.envs.checking.findings import Finding, problems, show
from treadle.envs.checking.trial_checks import check_trials, where_it_failed
from treadle.envs.checking.trials import Trial, Trials
from treadle.envs.data import DataEnvironment, question_of
from treadle.envs.rewards.calls import describe
from treadle.envs.scoring import Judge, reward_pool
from treadle.envs.seeds import stable_shuffle
from treadle.envs.side_by_side import show_progress
from treadle.errors import TreadleError

_MAX_WITH_TURNS = 10  # items: a rollout of several turns may start programs
_MAX_FAILURES = 10  # then the rest would only say the same
_REPORTED_SETTINGS = {*DataOptions.model_fields, "brevity", "max_token_length"}


class WatchedConfig(EnvConfig):
    """Remembers which of its settings were looked at, also in its copies."""

    _seen: set[str] = PrivateAttr(default_factory=set)

    @property
    def seen(self) -> list[str]:
        return sorted(self._seen)

    def __getattribute__(self, name: str) -> Any:
        if name in _REPORTED_SETTINGS:
            self._seen.add(name)
        return super().__getattribute__(name)


async def validate_task(
    env: EnvConfig,
    *,
    max_items: int = 200,
    max_seconds: float = 60.0,
    verbose: bool = False,
    console: Console | None = None,
) -> int:
    """Print what is wrong with a task, and with `verbose` also what is right; 1 when something is wrong.

    Answers are tried on at most `max_items` of each split, and not for much longer than `max_seconds`.
    """
    watched = WatchedConfig.model_validate(env.model_dump(exclude_unset=True))
    environment = load_environment(watched)
    try:
        findings = await _examine(environment, max_items, max_seconds)
    except TreadleError:
        raise
    except Exception as error:  # the border to code that a user writes
        what = describe(error)
        findings = [Finding("its own code", "problem", what, where_it_failed(what))]
    else:
        findings.append(_settings(environment))
    wrong = problems(findings)
    said = f"is not fit to be trained on: {', '.join(wrong)}" if wrong else "is fit to be trained on"
    console = console or Console()
    show(findings, console, verbose=verbose)
    console.print(f"'{env.own_name}' {said}")
    return int(bool(wrong))


async def _examine(environment: Environment, max_items: int, max_seconds: float) -> list[Finding]:
    config = environment.config
    async with reward_pool(config) as pool:
        await asyncio.to_thread(environment.prepare)
        await environment.open()
        try:
            listed = _listed(environment)
            num_train = max_items if listed is None else min(max_items, len(listed))
            # At least one: without items, that is told here.
            train = [environment.train_item(index) for index in range(max(1, num_train))]
            held_out = environment.eval_items()
            findings = [
                *_check_counts(environment, listed, held_out),
                _check_prompts([*(listed or train), *held_out]),
                _check_splits(listed or train, held_out),
                _check_repeatable(environment, listed, train, held_out),
            ]
            if problems(findings):
                return findings
            items = stable_shuffle([*train, *held_out[:max_items]], "trials")  # both splits, also where time is short
            with _without_logs():
                tried = await _try_answers(environment, Judge(environment, pool), items, max_seconds)
            return [*findings, tried.as_finding(len(items)), *check_trials(environment, tried.trials)]
        finally:
            await environment.close()


def _listed(environment: Environment) -> Sequence[Item] | None:
    """All training items; None when they are made as they are asked for."""
    return environment.train_items() if type(environment).train_item is Environment.train_item else None


def _check_counts(environment: Environment, listed: Sequence[Item] | None, held_out: Sequence[Item]) -> list[Finding]:
    findings = [
        Finding("training items", "ok", "made as they are asked for" if listed is None else f"{len(listed):,}"),
        Finding("held-out items", "ok", f"{len(held_out):,}")
        if held_out
        else Finding("held-out items", "warning", "none", "let eval_items return some: they show what was learned"),
    ]
    if isinstance(environment, DataEnvironment):
        findings.append(_check_rows(environment))
    return findings


def _check_rows(environment: DataEnvironment) -> Finding:
    data = environment.data
    apart = f"; {data.num_kept_apart:,} not trained on: a held-out one asks the same" if data.num_kept_apart else ""
    if not data.broken:
        return Finding("rows", "ok", f"all can be used{apart}")
    examples = "; ".join(map(str, data.broken[:3]))
    found = f"{len(data.broken):,} cannot be used: {examples}{apart}"
    return Finding("rows", "warning", found, "correct them, or leave them out of the file")


def _check_prompts(items: Sequence[Item]) -> Finding:
    faulty = next((item for item in items if not _is_prompt(item)), None)
    if faulty is not None:
        remedy = 'every message is {"role": "user", "content": "..."}, and one of them has words'
        return Finding("prompts", "problem", f"no prompt: {faulty.messages!r:.200}", remedy)
    lengths = [len(item.prompt) for item in items]
    return Finding("prompts", "ok", f"{statistics.median(lengths):.0f} characters (median), {max(lengths):,} (longest)")


def _is_prompt(item: Item) -> bool:
    return all({"role", "content"} <= set(message) for message in item.messages) and bool(item.prompt.strip())


def _check_splits(train: Sequence[Item], held_out: Sequence[Item]) -> Finding:
    name = "prompts of both splits"
    asked = {question_of(item) for item in train}
    num_both = sum(question_of(item) in asked for item in held_out)
    if not num_both:
        found = f"no prompt is in both; {len(asked):,} of {len(train):,} training prompts are distinct"
        return Finding(name, "ok", found)
    remedy = "train on others, or an evaluation shows what was learned by heart"
    return Finding(name, "warning", f"{num_both:,} held-out prompts are trained on too", remedy)


def _check_repeatable(
    environment: Environment, listed: Sequence[Item] | None, train: Sequence[Item], held_out: Sequence[Item]
) -> Finding:
    name = "repeatable"
    again = [environment.train_item(index) for index in reversed(range(len(train)))]
    is_same = again[::-1] == list(train) and list(environment.eval_items()) == list(held_out)
    if is_same and (listed is None or list(environment.train_items()) == list(listed)):
        return Finding(name, "ok", "the same index gives the same item")
    remedy = "make an item of its index and config.seed alone: a restarted run must go on with the same ones"
    return Finding(name, "problem", "the same index gives another item", remedy)


@dataclass(frozen=True)
class Tried:
    """The answers that were tried, and why not on all items."""

    trials: Sequence[Trial]
    why_stopped: str = ""

    def as_finding(self, num_items: int) -> Finding:
        num_tried = sum(trial.kind == "right" for trial in self.trials)
        return Finding("items tried", "ok", f"{num_tried:,} of {num_items:,}{self.why_stopped}")


@contextmanager
def _without_logs() -> Iterator[None]:
    """Every trial that fails would be logged with its traceback; the table tells the first in words."""
    logger = logging.getLogger("treadle.env")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)


async def _try_answers(environment: Environment, judge: Judge, items: Sequence[Item], max_seconds: float) -> Tried:
    trials = Trials(environment, judge, items)
    await trials.on(0)  # not counted: the workers start
    deadline = time.monotonic() + max_seconds
    tried: list[Trial] = []
    num_failures = 0
    num_to_try = min(len(items), _MAX_WITH_TURNS) if environment.has_turns else len(items)
    with show_progress("items tried", num_to_try) as report_progress:
        for place in range(num_to_try):
            answers = await trials.on(place)
            tried += answers
            num_failures += sum(answer.score.reward is None for answer in answers)
            report_progress(place + 1, f"{len(tried):,} answers scored")
            if num_failures >= _MAX_FAILURES:
                return Tried(tried, f": stopped after {num_failures} failures of scoring")
            if time.monotonic() > deadline and place + 1 < num_to_try:
                return Tried(tried, f": stopped after {max_seconds:g} s")
    return Tried(tried, "" if num_to_try == len(items) else ": enough for a task of several turns")


def _settings(environment: Environment) -> Finding:
    config = environment.config
    seen = ", ".join(config.seen) if isinstance(config, WatchedConfig) else ""
    own = ", ".join(f"{name} {value}" for name, value in environment.defaults.items() if value != "")
    reads = f"it reads {seen}" if seen else "it reads none of those that describe a task"
    return Finding("settings", "ok", reads + (f"; its own defaults: {own}" if own else ""))
