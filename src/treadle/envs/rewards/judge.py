"""Score completions by a judge: another model, asked over the OpenAI API, by a rubric or by comparing pairs."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from treadle.envs.rewards.base import CallResult, RewardInput
from treadle.envs.rewards.judge_client import (
    BudgetSpent,
    JudgeClient,
    JudgeFailed,
    JudgeSettings,
    Verdict,
    with_version,
)
from treadle.envs.rewards.judge_prompts import (
    Messages,
    pair_question,
    parse_points,
    parse_winner,
    rubric_question,
)
from treadle.envs.rewards.judge_store import JudgeStore
from treadle.envs.rewards.parsing import answer_text
from treadle.envs.rewards.services import ServiceReward
from treadle.errors import ConfigError, ScoringError
from treadle.log import get_logger

T = TypeVar("T")
log = get_logger("rewards")

DEFAULT_KEY = "TREADLE_JUDGE_KEY"
_FILE = "judge.sqlite"
_NO_METRICS = {"requests": 0.0, "failures": 0.0, "cache_hits": 0.0, "tokens": 0.0, "seconds": 0.0}
_ALONE = (
    "pairwise compares the completions of a group, and this one is alone, without an answer in its row: evaluate with "
    "--env.eval-samples 4, or not at all with --env.num-eval 0; in tasks of several turns use mode 'rubric'"
)


class JudgeReward(ServiceReward):
    """0 to 1: points by a rubric, or the share of comparisons with other completions of the group that were won.

    registry.create("judge", url="http://127.0.0.1:9100", model="Qwen/Qwen3-4B", rubric="It is polite and short.")
    """

    url: str = ""  # of the server, with or without /v1
    model: str = ""
    mode: Literal["rubric", "pairwise"] = "rubric"
    rubric: str = ""  # empty: the data row's own metadata["rubric"]
    max_points: int = 10  # rubric: the judge gives 0 to this many
    opponents: int = 4  # pairwise: completions that each one is compared with, each in both orders
    with_answer: bool = True  # show the judge the data row's answer, as a reference
    with_thinking: bool = False  # show it also what stands before </think>
    temperature: float = 0.0
    max_tokens: int = 512  # of the judge's answer
    body: dict[str, Any] = msgspec.field(default_factory=dict)  # further fields of a request; null removes one
    api_key_env: str = ""  # the environment variable that has the key; empty: TREADLE_JUDGE_KEY, if it is set
    max_concurrency: int = 16
    request_s: float = 60.0  # for one request
    deadline_s: float = 120.0  # for one question with all repetitions; waiting for a slot is not counted
    max_requests: int = 0  # of one environment in the whole run; 0: no limit
    max_total_tokens: int = 0  # the same, prompts and answers; 0: no limit
    when_spent: Literal["stop", "skip"] = "stop"
    cache: str = "run"  # "run": in the run's folder; "off"; or a file that several runs may share

    def check(self) -> None:
        if not self.url or not self.model:
            raise ConfigError(
                f"reward '{self.name}' needs the url and the model of its judge",
                fix=f'{{"type": "{self.name}", "params": {{"url": "http://HOST:PORT/v1", "model": "NAME"}}}}',
            )
        with_version(self.url)
        lowest = {"max_points": 1, "opponents": 1, "max_tokens": 1, "max_concurrency": 1, "max_requests": 0,
                  "max_total_tokens": 0, "temperature": 0}  # fmt: skip
        for name, low in lowest.items():
            if getattr(self, name) < low:
                raise ConfigError(f"reward '{self.name}' has {name} {getattr(self, name)}", fix=f"give {low} or more")
        if not 0 < self.request_s <= self.deadline_s:
            raise ConfigError(
                f"reward '{self.name}' has request_s {self.request_s:g} and deadline_s {self.deadline_s:g}",
                fix="0 < request_s <= deadline_s",
            )
        if "messages" in self.body or self.body.get("stream"):
            raise ConfigError(f"reward '{self.name}' cannot have messages or stream in its body", fix="leave them out")

    def check_installed(self) -> None:
        self.read_key()

    def read_key(self) -> str:
        key = os.environ.get(self.api_key_env or DEFAULT_KEY, "").strip()
        if self.api_key_env and not key:
            raise ConfigError(
                f"reward '{self.name}' reads its key from ${self.api_key_env}, which is not set",
                fix=f"export {self.api_key_env}=... where the environment runs",
            )
        return key

    def open_service(self, state_folder: Path | None) -> JudgeService:
        return JudgeService(self, state_folder)


@dataclass(frozen=True)
class Duel:
    """What the first of two completions got in both orders together: 0 to 1; None: there was a problem."""

    won: float | None
    problem: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)


class JudgeService:
    """Asks the judge about groups of completions. A question that fails marks only its completion."""

    def __init__(self, reward: JudgeReward, state_folder: Path | None) -> None:
        self._reward = reward
        of_run = JudgeStore(None if state_folder is None else state_folder / _FILE)
        answers = of_run if reward.cache in ("run", "off") else JudgeStore(Path(reward.cache).expanduser())
        self._stores = {of_run, answers}
        settings = JudgeSettings(
            name=reward.name,
            url=reward.url,
            api_key=reward.read_key(),
            body={
                "model": reward.model,
                "temperature": reward.temperature,
                "max_tokens": reward.max_tokens,
                **reward.body,
            },
            max_concurrency=reward.max_concurrency,
            request_s=reward.request_s,
            deadline_s=reward.deadline_s,
            max_requests=reward.max_requests,
            max_total_tokens=reward.max_total_tokens,
            uses_cache=reward.cache != "off",
        )
        self._client = JudgeClient(settings, answers, of_run)
        self._has_said_spent = False

    async def close(self) -> None:
        await self._client.close()
        for store in self._stores:
            await store.close()

    async def score(self, group: Sequence[RewardInput]) -> list[CallResult]:
        try:
            results = await (self._rate(group) if self._reward.mode == "rubric" else self._compare(group))
        except BudgetSpent:
            self._stop_or_skip()
            # Of the whole group: its scores are compared, so they must be of the same parts.
            results = [CallResult(scores=[None]) for _ in group]
        # All of them, so that a mean over groups is one over all groups.
        return [msgspec.structs.replace(result, metrics={**_NO_METRICS, **result.metrics}) for result in results]

    def _stop_or_skip(self) -> None:
        reward, client = self._reward, self._client
        spent = f"{client.num_requests:,} requests and {client.num_tokens:,} tokens"
        if reward.when_spent == "stop":
            raise ScoringError(
                f"the budget of the judge '{reward.name}' is spent: {spent}",
                fix="raise its max_requests or max_total_tokens and resume; or go on without it: when_spent = 'skip'",
            )
        if not self._has_said_spent:
            self._has_said_spent = True
            log.warning("judge_budget_spent", reward=reward.name, spent=spent, now="its part no longer counts")

    # ---- rubric

    async def _rate(self, group: Sequence[RewardInput]) -> list[CallResult]:
        results = await asyncio.gather(*map(self._rate_one, group), return_exceptions=True)
        return [_or_raise(result) for result in results]

    async def _rate_one(self, completion: RewardInput) -> CallResult:
        started = time.perf_counter()
        try:
            rubric = self._rubric_of(completion)
        except ValueError as error:
            return CallResult(outcome="raised", detail=str(error))
        question = rubric_question(
            {**self._context(completion, rubric), "ANSWER": self._shown(completion.text)},
            max_points=self._reward.max_points,
        )
        try:
            verdict = await self._client.ask(question, partial(parse_points, max_points=self._reward.max_points))
        except JudgeFailed as error:
            seconds = time.perf_counter() - started
            return CallResult(outcome="judge_failed", detail=str(error), seconds=seconds, metrics=error.metrics)
        return CallResult(scores=[verdict.value], seconds=time.perf_counter() - started, metrics=dict(verdict.metrics))

    # ---- pairwise

    async def _compare(self, group: Sequence[RewardInput]) -> list[CallResult]:
        """The share of comparisons that each completion won. One alone is compared with the row's answer."""
        started = time.perf_counter()
        texts = [self._shown(completion.text) for completion in group]
        if len(group) == 1:
            if not group[0].answer:
                return [CallResult(outcome="raised", detail=_ALONE)]
            texts.append(group[0].answer)
        try:
            rubric = self._rubric_of(group[0])
        except ValueError as error:
            return [CallResult(outcome="raised", detail=str(error)) for _ in group]
        context = self._context(group[0], rubric)
        if len(group) == 1:
            context.pop("REFERENCE", None)  # it is one of the two answers
        pairs = choose_pairs(len(texts), self._reward.opponents)
        found = await asyncio.gather(
            *(self._duel(context, texts[a], texts[b]) for a, b in pairs), return_exceptions=True
        )
        wins: list[list[float]] = [[] for _ in texts]
        problems: list[list[str]] = [[] for _ in texts]
        metrics: list[dict[str, float]] = [{} for _ in texts]
        for (a, b), result in zip(pairs, found, strict=True):
            duel = _or_raise(result)
            _add(metrics[a], duel.metrics)
            for place, won in ((a, duel.won), (b, None if duel.won is None else 1.0 - duel.won)):
                if won is None:
                    problems[place].append(duel.problem)
                else:
                    wins[place].append(won)
        seconds = (time.perf_counter() - started) / len(group)
        return [
            CallResult(scores=[sum(won) / len(won)], seconds=seconds, metrics=spent)
            if won
            else CallResult(outcome="judge_failed", detail=problem[0], seconds=seconds, metrics=spent)
            for won, problem, spent in zip(wins[: len(group)], problems, metrics, strict=False)
        ]

    async def _duel(self, context: Mapping[str, str], first: str, second: str) -> Duel:
        """Both orders. If one of them fails, neither counts: a single order favours one side."""
        if first == second:
            return Duel(0.5)
        orders = ((first, second), (second, first))
        asked = (self._ask_pair(pair_question({**context, "ANSWER 1": a, "ANSWER 2": b})) for a, b in orders)
        verdicts = await asyncio.gather(*asked)
        metrics: dict[str, float] = {}
        for verdict in verdicts:
            _add(metrics, verdict.metrics)
        problem = next((str(verdict) for verdict in verdicts if isinstance(verdict, JudgeFailed)), "")
        ahead, swapped = (0.5 if isinstance(verdict, JudgeFailed) else verdict.value for verdict in verdicts)
        return Duel(None if problem else (ahead + 1.0 - swapped) / 2, problem, metrics)

    async def _ask_pair(self, question: Messages) -> Verdict | JudgeFailed:
        try:
            return await self._client.ask(question, parse_winner)
        except JudgeFailed as error:
            return error

    # ---- texts

    def _context(self, completion: RewardInput, rubric: str) -> dict[str, str]:
        texts = {"RUBRIC": rubric, "TASK": completion.prompt}
        if self._reward.with_answer and completion.answer:
            texts["REFERENCE"] = completion.answer
        return texts

    def _rubric_of(self, completion: RewardInput) -> str:
        rubric = self._reward.rubric or completion.metadata.get("rubric")
        if not isinstance(rubric, str) or not rubric.strip():
            raise ValueError("there is no rubric: give the setting 'rubric', or each data row a column of that name")
        return rubric

    def _shown(self, text: str) -> str:
        return text if self._reward.with_thinking else answer_text(text)


def choose_pairs(num: int, opponents: int) -> list[tuple[int, int]]:
    """Pairs in which each of `num` completions occurs equally often: with `opponents` others, or with all.

    An odd number of completions cannot each have an odd number of opponents: then it is one less, at least 2.

    >>> choose_pairs(4, 2)
    [(0, 1), (1, 2), (2, 3), (3, 0)]
    """
    wanted = min(opponents, num - 1)
    if wanted == num - 1:
        return [(a, b) for a in range(num) for b in range(a + 1, num)]
    if num % 2 and wanted % 2:
        wanted = max(2, wanted - 1)
    pairs = [(a, (a + step) % num) for step in range(1, wanted // 2 + 1) for a in range(num)]
    if wanted % 2:  # the one opposite: a half of the pairs, as each is its opponent's
        pairs += [(a, a + num // 2) for a in range(num // 2)]
    return pairs


def _add(total: dict[str, float], more: Mapping[str, float]) -> None:
    for name, value in more.items():
        total[name] = total.get(name, 0.0) + value


def _or_raise(result: T | BaseException) -> T:
    if isinstance(result, BaseException):
        raise result
    return result
