"""Work beside other hubs on the same database.

What the queue holds is in the database. The rest a hub knows only from the calls it gets: which environments are alive,
whether a trainer waits, how the processes stand, which engines serve. Each hub sends it to the others about once a
second. A commit of another hub wakes the calls that wait for a batch here.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import msgspec

from treadle.hub.presence import GONE_AFTER_S
from treadle.hub.state import HubState
from treadle.log import get_logger
from treadle.store import ReadFailed
from treadle.wire.engines import EngineVerdicts
from treadle.wire.hub import LastReport

EXCHANGE_S = 1.0
SPREAD_S = 2.5 * EXCHANGE_S  # at most, from a fact at one hub to its effect at the others: they send and read in turn
FACTS_AGE_S = 5.0  # facts of a hub that has been silent for longer are out of date
log = get_logger("hub")


class HubFacts(msgspec.Struct, frozen=True):
    """What a hub sends to the others."""

    env_idle_s: dict[int, float]
    trainer_waits: bool
    reports: list[LastReport]
    verdicts: EngineVerdicts | None = None  # that the trainer posted to this hub


_FACTS = msgspec.json.Decoder(HubFacts)


@contextlib.asynccontextmanager
async def other_hubs(hub: HubState) -> AsyncIterator[None]:
    """Exchange facts with the other hubs while the block runs. Does nothing with a store that only one hub can use."""
    if not hub.store.is_shared:
        yield
        return
    loop = asyncio.get_running_loop()

    def wake() -> None:
        """Runs on a thread of the store."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(hub.batch_signal.ring)

    hub.store.change_watchers.append(wake)
    exchanging = asyncio.create_task(_exchange(hub))
    try:
        yield
    finally:
        hub.store.change_watchers.remove(wake)
        exchanging.cancel()


async def _exchange(hub: HubState) -> None:
    while True:
        heard: list[HubFacts] = []
        try:
            own = msgspec.json.encode(_facts_of(hub))
            heard = _decoded(await asyncio.to_thread(hub.store.exchange, own, FACTS_AGE_S))
        except ReadFailed:  # the store has logged it, and connects again
            pass
        except Exception:  # the boundary of the task: without it this hub would hear nothing more
            log.error("exchange_failed", exc_info=True)
        take_facts(hub, heard)
        await asyncio.sleep(EXCHANGE_S)


def _decoded(heard: list[bytes]) -> list[HubFacts]:
    """Without those of hubs of another release, whose facts have other fields."""
    found = []
    for facts in heard:
        try:
            found.append(_FACTS.decode(facts))
        except msgspec.MsgspecError as error:
            log.warning("facts_refused", why=str(error))
    return found


def _facts_of(hub: HubState) -> HubFacts:
    seen = hub.presence.seen_here_s()
    return HubFacts(
        env_idle_s={env_id: idle_s for env_id, idle_s in seen.items() if idle_s <= GONE_AFTER_S},
        trainer_waits=hub.batch_signal.somebody_waits_here,
        reports=hub.process_reports.standings_here(),
        verdicts=hub.engine_table.posted_here,
    )


def take_facts(hub: HubState, heard: list[HubFacts]) -> None:
    for facts in heard:
        for env_id, idle_s in facts.env_idle_s.items():
            hub.presence.mark(env_id, idle_s)
    hub.batch_signal.somebody_waits_elsewhere = any(facts.trainer_waits for facts in heard)
    hub.process_reports.elsewhere = [report for facts in heard for report in facts.reports]
    hub.engine_table.hear(facts.verdicts for facts in heard if facts.verdicts is not None)
