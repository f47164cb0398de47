"""Spread the requests of an environment over the engines whose weights are new enough.

    async with open_engine(ServerConfig(base_url=("http://a:9001/v1", "http://b:9001/v1"))) as engine:
        await engine.generate([1, 2, 3], max_tokens=24, temperature=1.0)

An engine whose policy version is too far behind gets no request until it has caught up. A single engine is not checked.
In a run with several engines the hub's table says which of them serve (engine_fleet.py).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

from treadle.background import awake_s
from treadle.config.env import ServerConfig
from treadle.config.section import HUB_TABLE
from treadle.envs.engine_client import EngineAway, EngineClient, EngineResult, ServedModel, all_together
from treadle.errors import ConfigError, EngineError
from treadle.log import get_logger
from treadle.net.client import RetryPolicy
from treadle.sync.model_folders import PUBLISHED_PREFIXES
from treadle.watch.waits import Waits, WaitSpec
from treadle.wire.generate import EngineHealth

log = get_logger("env")
T = TypeVar("T")

FAILOVER_S = 5.0  # an unanswered request goes to another engine after this time
REFRESH_S = 1.0  # interval for asking engines that are away or outdated for their version
REFRESH_TIMEOUT_S = 2.0
POLL_S = 0.05  # while no engine is usable
# A conversation leaves its engine if that has more than STICKY_LOAD times the completions of another, and STICKY_SLACK.
STICKY_LOAD = 1.5
STICKY_SLACK = 8
MAX_CONVERSATIONS = 10_000  # that are remembered
NO_RETRIES = RetryPolicy(give_up_after_s=0.0)  # no retries
OldestAllowed = Callable[[int], int]  # newest version of all engines -> oldest version that may be sampled


@dataclass
class PoolMember:
    client: EngineClient
    health: EngineHealth | None = None  # None: unreachable, or not asked yet
    num_running: int = 0  # requested completions that have not arrived
    checked_s: float = -math.inf
    checked_for: int = -1  # the oldest allowed version at the last check
    is_checking: bool = False  # a request for its version is running
    is_left_out: bool = False  # as logged last

    @property
    def version(self) -> int:
        return -1 if self.health is None else self.health.policy_version

    def __str__(self) -> str:
        health = self.health
        return f"{self.client.url} " + (
            "is away" if health is None else f"has version {health.policy_version} of {health.model}"
        )


def open_engine(
    config: ServerConfig,
    *,
    oldest_allowed: OldestAllowed = lambda newest: newest,
    retry_policy: RetryPolicy | None = None,
    waits: Waits | None = None,
    hub_url: str = "",
) -> InferenceClient:
    """The configured engine, or a pool if there are several; base_url "hub": those in the table of this hub."""
    if config.router_url and config.base_url != (HUB_TABLE,):
        raise ConfigError(
            "a router chooses among the engines in the hub's table, and --openai.base-url names engines",
            fix="--openai.base-url hub, or drop --openai.router-url",
        )
    if config.base_url == (HUB_TABLE,):
        from treadle.envs.engine_fleet import open_fleet  # it builds on this module

        return open_fleet(config, hub_url, oldest_allowed, retry_policy=retry_policy, waits=waits)
    if len(config.base_url) == 1:
        return EngineClient(config, retry_policy=retry_policy, waits=waits)
    retry_policy = retry_policy or RetryPolicy(give_up_after_s=config.timeout)
    failover = RetryPolicy(give_up_after_s=FAILOVER_S)
    clients = [EngineClient(one, retry_policy=failover, waits=waits) for one in config.each()]
    return EnginePool(clients, oldest_allowed, retry_policy=retry_policy, waits=waits)


class EnginePool(AbstractAsyncContextManager["EnginePool"]):
    """Several engines that serve the same policy, with the methods of one (EngineClient)."""

    def __init__(
        self,
        clients: Sequence[EngineClient],
        oldest_allowed: OldestAllowed,
        *,
        retry_policy: RetryPolicy,
        waits: Waits | None = None,
    ) -> None:
        self._members = [PoolMember(client) for client in clients]
        self._oldest_allowed = oldest_allowed
        self._retry_policy = retry_policy
        self._waits = waits or Waits()
        self._conversations: dict[str, PoolMember] = {}  # the engine of each conversation's last turn
        self._model: ServedModel | None = None  # of the first reachable engine; others must serve the same

    async def __aexit__(self, *_: object) -> None:
        async with AsyncExitStack() as stack:
            for member in self._members:
                await stack.enter_async_context(member.client)

    async def health(self) -> EngineHealth:
        """Combined health: the sum of their work, and the newest version.

        The first call raises ConfigError if the engines serve different models.
        """
        is_first = self._model is None
        fit = await self._wait_for_fit_members(everyone=True)
        reachable = {member.client.url: member.health for member in self._members if member.health is not None}
        there = list(reachable.values())
        if is_first and not all(map(self._serves_the_model, there)):
            models = ", ".join(f"{health.model} at {url}" for url, health in reachable.items())
            raise ConfigError(
                f"the engines serve different models: {models}", fix="name engines of one model in --openai.base-url"
            )
        return EngineHealth(
            status=there[0].status,
            model=there[0].model,
            policy_version=max(member.version for member in fit),
            num_running=sum(health.num_running for health in there),
            num_waiting=sum(health.num_waiting for health in there),
            generated_tokens=sum(health.generated_tokens for health in there),
            generating_s=sum(health.generating_s for health in there),
            kv_cache_usage=max(health.kv_cache_usage for health in there),
            max_num_seqs=sum(health.max_num_seqs for health in there),
        )

    async def served_models(self) -> list[ServedModel]:
        return await (await self._wait_for_fit_members())[0].client.served_models()

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        *,
        n: int = 1,
        max_tokens: int,
        temperature: float,
        seed: int | None = None,
        stop: Sequence[str] = (),
        conversation: str = "",
    ) -> EngineResult:
        """Sample on the engine with the fewest completions in flight. Further turns of a conversation go to the same
        engine, which has its tokens in its prefix cache, unless that has much more to do than another."""

        async def ask(fit: list[PoolMember], _: int) -> EngineResult:
            member = self._choose(fit, conversation)

            async def one() -> list[EngineResult]:
                result = await member.client.generate(
                    prompt_token_ids, n=n, max_tokens=max_tokens, temperature=temperature, seed=seed, stop=stop
                )
                return [result]

            with self._asking(member, n) as oldest:
                results = await self._checked(member, one())
                refuse_older(results, oldest, member.client.url)
            return results[0]

        return await self._until_answered(ask)

    async def generate_wave(
        self,
        wave_id: str,
        prompts: Sequence[Sequence[int]],
        *,
        n: int,
        max_tokens: int,
        temperature: float,
        seeds: Sequence[int] | None = None,
    ) -> list[EngineResult]:
        """Divide the wave equally among the engines, always in the same way. If one becomes unreachable, its part is
        asked of another."""
        engines = await self._wait_for_fit_members(0.0)

        async def ask_part(first: PoolMember, part: range) -> list[EngineResult]:
            places = slice(part.start, part.stop)

            async def ask(fit: list[PoolMember], attempt: int) -> list[EngineResult]:
                member = first if attempt == 0 and first in fit else self._choose(fit, "")
                with self._asking(member, n * len(part)) as oldest:
                    wave = member.client.generate_wave(
                        f"{wave_id}.{attempt}.{part.start}",
                        prompts[places],
                        n=n,
                        max_tokens=max_tokens,
                        temperature=temperature,
                        seeds=None if seeds is None else seeds[places],
                    )
                    results = await self._checked(member, wave)
                    refuse_older(results, oldest, member.client.url)
                return results

            return await self._until_answered(ask, refresh_s=0.0)

        # For few prompts there are fewer parts than engines.
        parts = zip(engines, _equal_parts(len(prompts), len(engines)), strict=False)
        answers = await all_together(ask_part(*one) for one in parts)
        return [generation for part in answers for generation in part]

    def _choose(self, fit: Sequence[PoolMember], conversation: str) -> PoolMember:
        chosen = min(fit, key=lambda one: one.num_running)
        if not conversation:
            return chosen
        most = STICKY_LOAD * chosen.num_running + STICKY_SLACK
        before = self._conversations.pop(conversation, None)
        if before is not None and before in fit and before.num_running <= most:
            chosen = before
        self._conversations[conversation] = chosen  # the newest last
        if len(self._conversations) > MAX_CONVERSATIONS:
            del self._conversations[next(iter(self._conversations))]
        return chosen

    async def _checked(self, _: PoolMember, answer: Awaitable[list[EngineResult]]) -> list[EngineResult]:
        """Wait for the answer of a member; a fleet also checks that the member has proved its weights."""
        return await answer

    async def _until_answered(
        self, ask: Callable[[list[PoolMember], int], Awaitable[T]], refresh_s: float = REFRESH_S
    ) -> T:
        """Retry on other engines if one becomes unreachable; refusals are raised at once."""
        began, attempt = awake_s(), 0
        while True:
            fit = await self._wait_for_fit_members(refresh_s)
            try:
                return await ask(fit, attempt)
            except EngineAway as error:
                attempt += 1
                if self._retry_policy.is_over(awake_s() - began):
                    raise
                log.warning("asked_another_engine", problem=error.message)

    @contextmanager
    def _asking(self, member: PoolMember, count: int) -> Iterator[int]:
        """Count completions as requested from this engine; yields the oldest version that they may have."""
        member.num_running += count
        try:
            yield self._oldest
        except EngineAway:
            member.health = None
            raise
        finally:
            member.num_running -= count

    async def _wait_for_fit_members(self, refresh_s: float = REFRESH_S, *, everyone: bool = False) -> list[PoolMember]:
        """The engines that answer and have new enough weights; waits while there is none."""
        await self._refresh(refresh_s, everyone=everyone)
        if fit := self._fit():
            return fit
        wanted = WaitSpec(f"an engine with weights of version {self._oldest} or newer", fix=_START_ONE, of="engine")
        with self._waits.waiting(wanted) as wait:
            began = awake_s()
            while not (fit := self._fit()):
                problem, wait.problem, wait.fix = self._why_none_is_fit()
                if self._retry_policy.is_over(awake_s() - began):
                    raise EngineError(f"{problem}: {wait.problem}", fix=wait.fix)
                await asyncio.sleep(POLL_S)
                await self._refresh(2 * POLL_S)
        return fit

    def _why_none_is_fit(self) -> tuple[str, str, str]:
        """(problem, how each engine stands, fix)."""
        is_any_there = any(member.health is not None for member in self._members)
        lack = f"has weights that are new enough (version {self._oldest} or newer)" if is_any_there else "answers"
        return (
            f"none of the {len(self._members)} engines {lack}",
            ", ".join(map(str, self._members)),
            _NAME_THE_TRAINED_ONE if is_any_there else _START_ONE,
        )

    @property
    def _oldest(self) -> int:
        versions = [m.version for m in self._members if m.health is not None and self._serves_the_model(m.health)]
        return max(0, self._oldest_allowed(max(versions, default=0)))

    def _is_fit(self, member: PoolMember) -> bool:
        return member.health is not None and member.version >= self._oldest and self._serves_the_model(member.health)

    def _serves_the_model(self, health: EngineHealth) -> bool:
        """Checked at every refresh: an engine may be restarted with another model during a run."""
        return self._model is None or self._model.is_called(health.model) or _is_trained(health.model)

    def _fit(self) -> list[PoolMember]:
        return [member for member in self._members if self._is_fit(member)]

    async def _refresh(self, interval_s: float, *, everyone: bool = False) -> None:
        """Ask engines for their version: all of them (`everyone`), or those that are not usable.

        Within `interval_s`, an unusable engine is asked again only if the oldest allowed version changed.
        """
        until_s, oldest = awake_s() - interval_s, self._oldest
        unfit = [
            m for m in self._members if not self._is_fit(m) and (m.checked_s <= until_s or m.checked_for != oldest)
        ]
        due = [member for member in (self._members if everyone else unfit) if not member.is_checking]
        await asyncio.gather(*map(self._refresh_one, due))
        if self._model is None:
            there = sorted((m.health.model for m in self._members if m.health is not None), key=_is_trained)
            self._model = next((ServedModel(id=model) for model in there), None)
        for member in due:
            is_fit = self._is_fit(member)
            if is_fit and member.is_left_out:
                log.info("engine_asked_again", engine=str(member), oldest_allowed=self._oldest)
            elif not is_fit and not member.is_left_out:
                log.warning("engine_left_out", engine=str(member), oldest_allowed=self._oldest)
            member.is_left_out = not is_fit

    async def _refresh_one(self, member: PoolMember) -> None:
        member.is_checking, member.checked_for = True, self._oldest
        try:
            async with asyncio.timeout(REFRESH_TIMEOUT_S):
                health = await member.client.health(NO_RETRIES)
            member.health = None if health.status.startswith("failed") else health
        except (EngineError, TimeoutError):
            member.health = None
        finally:
            member.is_checking, member.checked_s = False, awake_s()


InferenceClient = EngineClient | EnginePool


def _is_trained(model: str) -> bool:
    """Whether the trainer restarted the engine from the folder of a version (weight_bridge_mode none)."""
    return Path(model).name.startswith(PUBLISHED_PREFIXES)


def refuse_older(generations: Sequence[EngineResult], oldest: int, url: str) -> None:
    """An engine that was restarted after its version was read has its initial weights."""
    sampled = min((one.policy_version for each in generations for one in each.completions), default=oldest)
    if sampled < oldest:
        raise EngineAway(
            f"the engine at {url} answered with version {sampled}, and version {oldest} or newer was wanted",
            fix=_NAME_THE_TRAINED_ONE,
        )


def _equal_parts(count: int, num_parts: int) -> list[range]:
    """Divide the indices 0 to count-1, in order, into at most `num_parts` parts of nearly the same size.

    >>> _equal_parts(5, 2)
    [range(0, 3), range(3, 5)]
    """
    size, larger = divmod(count, num_parts)
    starts = [i * size + min(i, larger) for i in range(num_parts + 1)]
    return [range(*ends) for ends in pairwise(starts) if ends[0] < ends[1]]


_START_ONE = "start it with `treadle engine`, or name others with --openai.base-url"
_NAME_THE_TRAINED_ONE = (
    "name the engine that the trainer hands its weights to (treadle train --engine-url) in --openai.base-url, or "
    "allow older weights: a larger --env.max-age"
)
