"""Engines of a run that come and go: the hub's table says which of them serve, and the pool asks only those.

    table (GET /v1/engines)  ──>  members: state "serving", proved version new enough
    request  ──> a member ──> answer ──> is it of the engine that proved its weights, and of a version that it proved?
                   |                        no: the same prompt is asked elsewhere, and nothing of the answer is used
                   └── it dies, hangs, or the trainer takes it out: likewise

An answer under a version that is just being proved waits for the proof, so no group is ever made from an engine whose
weights turn out to be wrong.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from treadle.background import awake_s
from treadle.config.env import ServerConfig
from treadle.envs.engine_client import EngineAway, EngineClient, EngineResult
from treadle.envs.engine_pool import NO_RETRIES, EnginePool, OldestAllowed, PoolMember
from treadle.envs.transport import Peer
from treadle.errors import ConfigError, EngineError, HubError
from treadle.log import get_logger
from treadle.net.access_tokens import HUB_TOKEN_VARIABLE
from treadle.net.client import RetryPolicy
from treadle.watch.waits import Waits
from treadle.wire.engines import TABLE_POLL_S, EngineEntry, Engines, table_interval
from treadle.wire.generate import EngineHealth

log = get_logger("env")
T = TypeVar("T")

PROOF_POLL_S = 0.1
PROOF_S = 300.0  # an answer whose version is not proved within this time is asked for elsewhere
DISTRUST_S = 1.0  # an engine that did not answer gets no request for this time
HUB_TIMEOUT_S = 5.0


def open_fleet(
    config: ServerConfig,
    hub_url: str,
    oldest_allowed: OldestAllowed,
    *,
    retry_policy: RetryPolicy | None = None,
    waits: Waits | None = None,
) -> FleetPool:
    if not hub_url:
        raise ConfigError("--openai.base-url hub needs a hub", fix="name it with --env.hub-url")
    hub = Peer(
        "hub", hub_url, error=HubError, timeout_s=HUB_TIMEOUT_S, api_key=os.environ.get(HUB_TOKEN_VARIABLE, ""),
        waits=waits,
    )  # fmt: skip

    def connect(url: str) -> EngineClient:
        return EngineClient(
            config.model_copy(update={"base_url": (url,)}),
            retry_policy=NO_RETRIES,  # another engine is asked at once
            waits=waits,
        )

    retry_policy = retry_policy or RetryPolicy(give_up_after_s=config.timeout)
    if config.router_url:
        from treadle.envs.routed_fleet import RoutedFleet, connect_router  # it builds on this module

        router = connect_router(config, retry_policy, waits)
        return RoutedFleet(router, hub, connect, oldest_allowed, retry_policy=retry_policy, waits=waits)
    return FleetPool(hub, connect, oldest_allowed, retry_policy=retry_policy, waits=waits)


@dataclass(eq=False)
class FleetEngine(PoolMember):
    """One start of one engine, while the table lists it."""

    entry: EngineEntry | None = None
    left: asyncio.Event = field(default_factory=asyncio.Event)  # it does not serve any more

    @property
    def version(self) -> int:
        return -1 if self.entry is None or self.entry.proved_version is None else self.entry.proved_version


class FleetPool(EnginePool):
    def __init__(
        self,
        hub: Peer,
        connect: Callable[[str], EngineClient],
        oldest_allowed: OldestAllowed,
        *,
        retry_policy: RetryPolicy,
        waits: Waits | None = None,
    ) -> None:
        super().__init__([], oldest_allowed, retry_policy=retry_policy, waits=waits)
        self._hub = hub
        self._connect = connect
        self._by_id: dict[str, FleetEngine] = {}
        self._table: Sequence[EngineEntry] = ()
        self._num_present = 1  # environments, as the table said last
        self._read_s = -1e9
        self._reading: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._num_asked = 0  # requests in flight
        self._closing: set[asyncio.Task[None]] = set()

    async def __aexit__(self, *error: object) -> None:
        for task in (self._reading, self._watching):
            if task is not None:
                task.cancel()
        await super().__aexit__(*error)
        await asyncio.gather(*self._closing, return_exceptions=True)
        await self._hub.close()

    # ---- the table

    async def _refresh(self, interval_s: float, *, everyone: bool = False) -> None:
        await self._read_table(0.0 if everyone else interval_s)
        if everyone:
            await asyncio.gather(*(self._ask_health(engine) for engine in self._by_id.values()))

    async def _read_table(self, interval_s: float) -> None:
        """Read the table, unless it was read within `interval_s`, or longer if there are many environments; concurrent
        callers share one call."""
        if self._reading is None and awake_s() - self._read_s < table_interval(interval_s, self._num_present):
            return
        if self._reading is None:
            self._reading = asyncio.ensure_future(self._fetch())
        reading = self._reading
        await asyncio.shield(reading)

    async def _fetch(self) -> None:
        try:
            answer = await self._hub.send("GET", "/v1/engines", retry_policy=NO_RETRIES)
            self._take(self._hub.read(answer, Engines))
        except HubError as error:  # it restarts: what it said last still holds
            log.debug("table_not_read", problem=error.message)
        finally:
            self._read_s, self._reading = awake_s(), None

    def _take(self, table: Engines) -> None:
        if not table.has_trainer and self._by_id:
            return  # the hub was restarted, and the trainer has not posted its verdicts again yet
        self._table, self._num_present = table.engines, table.num_present
        serving = {entry.engine_id: entry for entry in table.engines if entry.state == "serving"}
        for engine_id, engine in list(self._by_id.items()):
            if engine_id not in serving:
                self._forget(engine, next((e for e in table.engines if e.engine_id == engine_id), None))
        for engine_id, entry in serving.items():
            if engine_id not in self._by_id:
                self._by_id[engine_id] = FleetEngine(self._connect(entry.url))
                log.info("engine_serves", engine=entry.url, version=entry.proved_version)
            engine = self._by_id[engine_id]
            engine.entry = entry
            if engine.health is None and awake_s() - engine.checked_s > DISTRUST_S:
                engine.health = health_of(entry)
        self._members = list(self._by_id.values())

    def _forget(self, engine: FleetEngine, entry: EngineEntry | None) -> None:
        assert engine.entry is not None  # noqa: S101 - set when it was listed
        del self._by_id[engine.entry.engine_id]
        engine.left.set()
        why = "it is not in the table any more" if entry is None else entry.reason or f"it is {entry.state}"
        log.warning("engine_left", engine=engine.client.url, reason=why)
        self._in_background(engine.client.__aexit__(None, None, None))

    def _in_background(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run `work`, which ends soon or is cancelled; the pool is closed after it."""
        task = asyncio.ensure_future(work)
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
        return task

    async def _ask_health(self, engine: FleetEngine) -> None:
        try:
            engine.health = await engine.client.health(NO_RETRIES)
        except EngineError:
            self._distrust(engine)

    def _distrust(self, engine: FleetEngine) -> None:
        engine.health, engine.checked_s = None, awake_s()

    def _is_fit(self, member: PoolMember) -> bool:
        return member.health is not None and member.version >= self._oldest

    def _why_none_is_fit(self) -> tuple[str, str, str]:
        listed = [f"{row.url} is {row.state}" + (f" ({row.reason})" if row.reason else "") for row in self._table]
        return (
            f"none of the engines in the hub's table serves version {self._oldest} or newer",
            ", ".join(listed) or "the table is empty",
            "see why in the trainer's log; start another with `treadle engine --join HUB`",
        )

    @property
    def _oldest(self) -> int:
        """Weights of the newest proved version may be as old as the environment allows."""
        return max(0, self._oldest_allowed(max((engine.version for engine in self._by_id.values()), default=0)))

    # ---- requests

    async def _checked(self, member: PoolMember, answer: Awaitable[list[EngineResult]]) -> list[EngineResult]:
        assert isinstance(member, FleetEngine)  # noqa: S101 - a fleet has no others
        before = member.entry
        try:
            results = await self._wait_for_answer(
                answer, member.left, f"the engine at {member.client.url} was taken out while it generated"
            )
            await self._until_proved(member, before, results)
            return results
        except EngineAway:
            member.checked_s = awake_s()
            raise

    async def _wait_for_answer(self, answer: Awaitable[T], given_up: asyncio.Event, why: str) -> T:
        """The answer, unless `given_up` is set first (EngineAway); the table is read meanwhile."""
        asked, giving_up = asyncio.ensure_future(answer), asyncio.ensure_future(given_up.wait())
        self._num_asked += 1
        if self._watching is None or self._watching.done():
            self._watching = asyncio.ensure_future(self._watch_table())
        try:
            await asyncio.wait({asked, giving_up}, return_when=asyncio.FIRST_COMPLETED)
            if not asked.done():
                raise EngineAway(why)
            return asked.result()
        finally:
            self._num_asked -= 1
            asked.cancel()
            giving_up.cancel()

    async def _watch_table(self) -> None:
        """An engine that hangs never answers: the table says when it is out."""
        while self._num_asked:
            await asyncio.sleep(TABLE_POLL_S)
            await self._read_table(TABLE_POLL_S)

    async def _until_proved(self, engine: FleetEngine, before: EngineEntry | None, results: list[EngineResult]) -> None:
        """Wait until every version in the answer is proved; `before`: the table's row when the request was sent."""
        entry = engine.entry
        if entry is None or any(result.engine_id != entry.engine_id for result in results):
            raise EngineAway(f"the engine at {engine.client.url} was restarted, and its weights are not verified yet")
        versions = [completion.policy_version for result in results for completion in result.completions]
        oldest, newest = min(versions), max([*versions, *(result.newest_version for result in results)])
        began = awake_s()
        while not any(_has_proved(row, oldest, newest) for row in (before, engine.entry)):
            skipped = engine.entry is not None and oldest < (engine.entry.proved_since or 0)  # its proof has failed
            if skipped or engine.left.is_set() or awake_s() - began > PROOF_S:
                raise EngineAway(f"version {newest} is not verified in the engine at {engine.client.url}")
            await asyncio.sleep(PROOF_POLL_S)
            await self._read_table(PROOF_POLL_S)


def _has_proved(entry: EngineEntry | None, oldest: int, newest: int) -> bool:
    if entry is None or entry.proved_since is None or entry.proved_version is None:
        return False
    return entry.proved_since <= oldest and newest <= entry.proved_version


def health_of(entry: EngineEntry) -> EngineHealth:
    """Until it is asked itself."""
    served = entry.served
    return EngineHealth(
        status="ok",
        model="" if served is None else served.model,
        policy_version=entry.proved_version or 0,
        max_num_seqs=0 if served is None else served.max_num_seqs,
    )
