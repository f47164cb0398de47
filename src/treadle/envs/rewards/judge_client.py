"""Ask a judge on an OpenAI-compatible server: retries, a deadline, limited concurrency, a budget and a cache.

ask(messages) -> asked at this moment?  wait for that one's answer
              -> asked before?          the answer of the cache
              -> a slot of max_concurrency -> budget -> POST /v1/chat/completions, repeated until deadline_s
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from treadle.envs.rewards.judge_prompts import Messages, UnreadableAnswer, correction
from treadle.envs.rewards.judge_store import JudgeStore
from treadle.errors import ConfigError, ScoringError
from treadle.log import get_logger
from treadle.net.address import is_loopback, shown_url
from treadle.net.client import OK, Failure, HttpAnswer, LateAnswer, NoAnswer, PooledHttpClient, Retries, RetryPolicy

CHARS_PER_TOKEN = 4  # to count the tokens of a server that does not report them
MAX_SHOWN_ANSWERS = 3  # unreadable ones that are logged
_NOT_ALLOWED = (301, 302, 307, 308, 401, 403, 404, 405)  # the address, the key or the model is wrong
_DISK_FULL = 507

log = get_logger("rewards")


class JudgeFailed(Exception):
    """A question has no usable answer; `metrics` is what was spent on it."""

    def __init__(self, problem: str, metrics: Mapping[str, float] | None = None) -> None:
        super().__init__(problem)
        self.metrics = dict(metrics or {})


class BudgetSpent(Exception):
    """No more requests are allowed in this run."""


@dataclass(frozen=True)
class Verdict:
    """A parsed answer, and what was spent on it: {"requests": 1, "tokens": 312, "seconds": 0.8}."""

    value: float
    metrics: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class JudgeSettings:
    """What a client needs to know of a JudgeReward."""

    name: str
    url: str
    api_key: str = field(default="", repr=False)
    body: Mapping[str, Any]  # of every request, without the messages
    max_concurrency: int
    request_s: float
    deadline_s: float
    max_requests: int
    max_total_tokens: int
    uses_cache: bool = True


class JudgeClient:
    def __init__(self, settings: JudgeSettings, answers: JudgeStore, spending: JudgeStore) -> None:
        """`answers` and `spending`: the files of the cache and of the run; may be the same."""
        self._settings = settings
        self._answers = answers
        self._spending = spending
        self.num_requests, self.num_tokens = spending.spent(settings.name)
        self._url = with_version(settings.url)
        headers = {"Content-Type": "application/json"}
        if settings.api_key:
            headers["Authorization"] = f"Bearer {settings.api_key}"
        self._http = PooledHttpClient(
            self._url, headers=headers, timeout_s=settings.request_s, trust_env=not is_loopback(self._url)
        )
        self._policy = RetryPolicy(give_up_after_s=settings.deadline_s, first_pause_s=0.5, longest_pause_s=20.0)
        self._slots = asyncio.Semaphore(settings.max_concurrency)
        self._running: dict[bytes, asyncio.Task[Verdict]] = {}
        self._has_answered = False
        self._num_shown = 0

    async def ask(self, messages: Messages, parse: Callable[[str], float]) -> Verdict:
        """The parsed answer; `parse` raises UnreadableAnswer. Raises JudgeFailed, BudgetSpent or ScoringError.

        The same question at the same moment is asked once. It is asked to its end, also if its caller is cancelled:
        the answer is paid for, and the cache keeps it.
        """
        body = {**self._settings.body, "messages": messages}
        body = {name: value for name, value in body.items() if value is not None}
        key = question_key(self._url, body)
        running = self._running.get(key)
        if running is not None:
            try:
                verdict = await asyncio.shield(running)
            except JudgeFailed as error:
                raise JudgeFailed(str(error), {"failures": 1}) from None
            return Verdict(verdict.value, {"cache_hits": 1})
        task = self._running[key] = asyncio.ensure_future(self._answer(key, body, parse))
        task.add_done_callback(lambda done: self._forget(key, done))
        return await asyncio.shield(task)

    def _forget(self, key: bytes, done: asyncio.Task[Verdict]) -> None:
        del self._running[key]
        if not done.cancelled():
            done.exception()  # its caller may be gone: it is not reported as unseen

    async def close(self) -> None:
        for task in (tasks := list(self._running.values())):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._http.close()

    async def _answer(self, key: bytes, body: dict[str, Any], parse: Callable[[str], float]) -> Verdict:
        if self._settings.uses_cache and (known := await self._answers.answer(key)) is not None:
            return Verdict(parse(known), {"cache_hits": 1})
        spent: dict[str, float] = {}
        async with self._slots:
            started = time.monotonic()
            retries = Retries(self._policy)  # one deadline for the question and its correction
            try:
                text = await self._complete(body, retries, started, spent)
                try:
                    value = parse(text)
                except UnreadableAnswer as error:
                    self._show(text, error)
                    again = {**body, "messages": [*body["messages"], *correction(text, str(error))]}
                    text = await self._complete(again, retries, started, spent)
                    value = parse(text)
            except (JudgeFailed, UnreadableAnswer) as error:
                metrics = {**spent, "failures": 1, "seconds": time.monotonic() - started}
                said = f"the answer cannot be read: {error}" if isinstance(error, UnreadableAnswer) else str(error)
                raise JudgeFailed(said, metrics) from None
            metrics = {**spent, "seconds": time.monotonic() - started}
        if self._settings.uses_cache:
            await self._answers.keep(key, text)
        return Verdict(value, metrics)

    async def _complete(self, body: dict[str, Any], retries: Retries, started: float, spent: dict[str, float]) -> str:
        """The text of one completion. Calls that fail are repeated until the deadline."""
        settings = self._settings
        while True:
            await self._take_request()
            left_s = settings.deadline_s - (time.monotonic() - started)
            outcome = await self._post(body, max(min(settings.request_s, left_s), 0.001))
            found = self._usable(outcome)
            text, num_tokens = "", 0
            if isinstance(found, HttpAnswer) and found.status == OK:
                text, num_tokens = read_completion(found, body)
            await self._count(was_sent=not is_unreachable(outcome), num_tokens=num_tokens, spent=spent)
            if isinstance(found, HttpAnswer):
                if found.status != OK:
                    raise self._refusal(found)
                self._has_answered = True
                if is_cut_off(found):  # its last line may lack digits: SCORE: 1 of SCORE: 10
                    raise JudgeFailed("the judge's answer was cut off: raise the reward's max_tokens")
                return text
            pause_s = retries.pause_s(found)
            if pause_s is None:
                problem = self._without_key(found.problem)
                raise JudgeFailed(f"no answer of {shown_url(self._url)} in {settings.deadline_s:g} s: {problem}")
            await asyncio.sleep(pause_s)

    async def _post(self, body: dict[str, Any], limit_s: float) -> HttpAnswer | NoAnswer:
        content = json.dumps(body).encode()
        try:
            return await self._http.request("POST", "/chat/completions", body=content, timeout_s=limit_s)
        except NoAnswer as error:
            is_late = isinstance(error.__cause__, TimeoutError)
            return LateAnswer(f"nothing within {limit_s:.3g} s") if is_late else error

    def _usable(self, outcome: HttpAnswer | NoAnswer) -> HttpAnswer | Failure:
        if isinstance(outcome, HttpAnswer):
            if outcome.status == _DISK_FULL:  # on the machine of the judge
                return Failure(f"status {outcome.status}: {outcome.message}", is_answer=True)
            if outcome.status == OK and not is_completion(outcome):
                return Failure("its answer is no chat completion", is_answer=True)
        return self._policy.check(outcome, "judge")

    def _refusal(self, answer: HttpAnswer) -> Exception:
        """A wrong address, key or model concerns every question: it ends the environment, unless it worked before."""
        problem = f"status {answer.status}: {self._without_key(answer.message)}"
        if answer.status in _NOT_ALLOWED and not self._has_answered:
            return ScoringError(
                f"the judge of reward '{self._settings.name}' at {shown_url(self._url)} refuses: {problem}",
                fix="check the reward's url, model and api_key_env",
            )
        return JudgeFailed(f"refused with {problem}")

    async def _take_request(self) -> None:
        """Count a request before it is sent, also on disk: one that a kill interrupts may have been paid for."""
        settings = self._settings
        is_over = 0 < settings.max_requests <= self.num_requests
        if is_over or 0 < settings.max_total_tokens <= self.num_tokens:
            raise BudgetSpent
        self.num_requests += 1
        await self._spending.spend(settings.name, requests=1, tokens=0)

    async def _count(self, *, was_sent: bool, num_tokens: int, spent: dict[str, float]) -> None:
        """Add a request that ended to what was spent on its question, and its tokens to those of the run."""
        if not was_sent:  # it costs nothing, and a server that is away must not use up the budget
            self.num_requests -= 1
            await self._spending.spend(self._settings.name, requests=-1, tokens=0)
            return
        self.num_tokens += num_tokens
        for name, value in (("requests", 1), ("tokens", num_tokens)):
            spent[name] = spent.get(name, 0) + value
        await self._spending.spend(self._settings.name, requests=0, tokens=num_tokens)

    def _show(self, text: str, error: UnreadableAnswer) -> None:
        """Log the first unreadable answers; the errors of rollouts only say what is wrong with them."""
        self._num_shown += 1
        if self._num_shown <= MAX_SHOWN_ANSWERS:
            log.warning("judge_unreadable", reward=self._settings.name, problem=str(error), answer=text[-500:])

    def _without_key(self, text: str) -> str:
        """A server may quote the key that it refuses."""
        return text.replace(self._settings.api_key, "***") if self._settings.api_key else text


# ---- pure


def with_version(url: str) -> str:
    """`with_version("http://127.0.0.1:9100") == "http://127.0.0.1:9100/v1"`; other paths stay."""
    try:
        parts = urlsplit(url)
        is_good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_good = False
    if not is_good:
        raise ConfigError(f"'{url}' is not the URL of a judge", fix="write it as http://HOST:PORT/v1")
    return url.rstrip("/") + ("/v1" if not parts.path.strip("/") else "")


def question_key(url: str, body: Mapping[str, Any]) -> bytes:
    """A hash of all that decides the answer: the server and the whole request."""
    return hashlib.sha256(json.dumps([url, body], sort_keys=True).encode()).digest()


def is_completion(answer: HttpAnswer) -> bool:
    try:
        return isinstance(answer.values["choices"][0]["message"], dict)
    except (KeyError, IndexError, TypeError):
        return False


def is_cut_off(completion: HttpAnswer) -> bool:
    """Whether the answer ended at its limit of tokens."""
    return bool(completion.values["choices"][0].get("finish_reason") == "length")


def is_unreachable(outcome: HttpAnswer | NoAnswer) -> bool:
    """Whether there was no connection, so that nothing was asked."""
    import aiohttp

    return isinstance(outcome, NoAnswer) and isinstance(outcome.__cause__, aiohttp.ClientConnectorError)


def read_completion(answer: HttpAnswer, body: Mapping[str, Any]) -> tuple[str, int]:
    """The text and the tokens that were spent; they are estimated for a server that reports none."""
    content = answer.values["choices"][0]["message"].get("content")
    text = content if isinstance(content, str) else ""  # a refusal or a tool call
    usage = answer.values.get("usage")
    total = usage.get("total_tokens") if isinstance(usage, dict) else None
    if isinstance(total, int) and total > 0:
        return text, total
    num_chars = len(text) + sum(len(message["content"]) for message in body["messages"])
    return text, num_chars // CHARS_PER_TOKEN + 1
