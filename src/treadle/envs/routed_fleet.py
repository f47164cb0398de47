"""Engines of a run behind a router (smg): completions go through one address, and their answers are checked.

    request ──> router ──> an engine ──> answer ──> which start of which engine? the hub's table says what it has proved
                   |                       no entry, or not this version: asked again, nothing of the answer is used
                   └── engine dies: the router asks another; engine hangs: the environment asks again

The router chooses the engine, by load and by prefix, and the same one for all turns of a rollout. The table is still
read from the hub, and the load of engines from themselves; neither goes through the router.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from treadle.config.env import ServerConfig
from treadle.envs.engine_client import EngineAway, EngineClient, EngineResult, ServedModel, all_together
from treadle.envs.engine_fleet import FleetEngine, FleetPool, health_of
from treadle.envs.engine_pool import NO_RETRIES, OldestAllowed, PoolMember, refuse_older
from treadle.envs.transport import Peer
from treadle.errors import EngineError
from treadle.log import get_logger
from treadle.net.address import shown_url
from treadle.net.client import RetryPolicy
from treadle.watch.waits import Waits
from treadle.wire.engines import EngineEntry

log = get_logger("env")

UNPROVED_PAUSE_S = 0.5  # after an answer that is not used; the router learns of the engine's state meanwhile
HANGS_AFTER_S = 1.5  # an engine that left and does not answer GET /health within this time
ROUTER_LEARNS_S = 5.0  # that an engine has left; it reads the table by itself, usually within 0.3 s
# Beside those of every server: smg answers 404 while it has no engine.
RETRIED_STATUSES = frozenset({404, 429, *range(500, 600)})


def connect_router(config: ServerConfig, retry_policy: RetryPolicy, waits: Waits | None) -> EngineClient:
    return EngineClient(
        config.model_copy(update={"base_url": (config.router_url,)}),
        retry_policy=replace(retry_policy, statuses=RETRIED_STATUSES),
        waits=waits,
        is_router=True,
    )


class RoutedFleet(FleetPool):
    def __init__(
        self,
        router: EngineClient,
        hub: Peer,
        connect: Callable[[str], EngineClient],
        oldest_allowed: OldestAllowed,
        *,
        retry_policy: RetryPolicy,
        waits: Waits | None = None,
    ) -> None:
        super().__init__(hub, connect, oldest_allowed, retry_policy=retry_policy, waits=waits)
        self._router = router
        self._in_flight: set[asyncio.Event] = set()  # one per request; set: ask again
        self._watches: set[asyncio.Task[None]] = set()  # of engines that have left

    async def __aexit__(self, *error: object) -> None:
        for watch in self._watches:
            watch.cancel()
        await self._router.__aexit__(*error)
        await super().__aexit__(*error)

    async def served_models(self) -> list[ServedModel]:
        await self._wait_for_fit_members()
        return await self._router.served_models()

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
        """Sample on the engine that the router chooses; requests of a conversation go to the same one."""

        async def ask(_fit: list[PoolMember], _attempt: int) -> EngineResult:
            oldest, before = self._oldest, {name: (each, each.entry) for name, each in self._by_id.items()}
            answer = self._router.generate(
                prompt_token_ids,
                n=n,
                max_tokens=max_tokens,
                temperature=temperature,
                seed=seed,
                stop=stop,
                conversation=conversation,
            )
            given_up = asyncio.Event()
            self._in_flight.add(given_up)
            try:
                result = await self._wait_for_answer(answer, given_up, "an engine hangs that may have the request")
            finally:
                self._in_flight.discard(given_up)
            try:
                await self._check_proof(before, result)
                refuse_older([result], oldest, self._router.url)
            except EngineAway:
                await asyncio.sleep(UNPROVED_PAUSE_S)
                raise
            return result

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
        """Ask for each prompt by itself: an engine would wait for the whole wave, and the router divides it."""
        return await all_together(
            self.generate(
                prompt,
                n=n,
                max_tokens=max_tokens,
                temperature=temperature,
                seed=None if seeds is None else seeds[index],
            )
            for index, prompt in enumerate(prompts)
        )

    async def _check_proof(
        self, before: Mapping[str, tuple[FleetEngine, EngineEntry | None]], result: EngineResult
    ) -> None:
        """Wait until every version in the answer is proved; `before`: the engines that served when it was asked for."""
        engine, entry = before.get(result.engine_id, (None, None))
        if engine is None:  # it may have begun to serve since then
            await self._read_table(0.0)
            engine = self._by_id.get(result.engine_id)
        if engine is None:
            raise EngineAway(f"an engine with unverified weights answered ({result.engine_id or 'it has no id'})")
        await self._until_proved(engine, entry, [result])

    def _fit(self) -> list[PoolMember]:
        """None while one of them has older weights than allowed: the router could choose it."""
        is_one_behind = any(member.version < self._oldest for member in self._members)
        return [] if is_one_behind else super()._fit()

    def _distrust(self, engine: FleetEngine) -> None:
        """The router asks engines; their load is not known to an environment that does not reach them."""
        if engine.entry is not None:
            engine.health = health_of(engine.entry)

    def _forget(self, engine: FleetEngine, entry: EngineEntry | None) -> None:
        super()._forget(engine, entry)
        if engine.entry is not None:
            watch = self._in_background(self._ask_again_if_it_hangs(engine.entry.url))
            self._watches.add(watch)
            watch.add_done_callback(self._watches.discard)

    async def _ask_again_if_it_hangs(self, url: str) -> None:
        """The router waits for ever for an engine that hangs, and does not say which requests it has. So all are asked
        again; a second time, because the router may have sent it some until it read the table too."""
        for pause_s in (0.0, ROUTER_LEARNS_S):
            await asyncio.sleep(pause_s)
            if not await self._hangs(url):
                return
            log.warning("asked_again", engine=shown_url(url), requests=len(self._in_flight))
            for given_up in self._in_flight:
                given_up.set()

    async def _hangs(self, url: str) -> bool:
        """Whether it neither answers nor has ended; what one that has ended had, the router has sent to others."""
        async with self._connect(url) as client:
            try:
                async with asyncio.timeout(HANGS_AFTER_S):
                    await client.health(NO_RETRIES)
            except TimeoutError:
                return True
            except EngineError:
                return False
        return False
