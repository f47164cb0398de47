"""The exchange of facts between hubs on one database goes on, whatever another hub sends."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import msgspec
import pytest

from treadle.hub import other_hubs
from treadle.hub.engine_table import EngineTable
from treadle.hub.presence import GONE_AFTER_S, Presence

FACTS = msgspec.json.encode({"env_idle_s": {"0": 0.5}, "trainer_waits": True, "reports": []})
OF_ANOTHER_RELEASE = b'{"env_idle_s":{"1":0.5},"reports":[]}'


def test_facts_that_do_not_decode_and_errors_do_not_end_the_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(other_hubs, "EXCHANGE_S", 0.001)
    answers = iter([[OF_ANOTHER_RELEASE, FACTS], RuntimeError("a fault of the store"), [FACTS]])
    waited: list[bool] = []

    def exchange(own: bytes, max_age_s: float) -> list[bytes]:
        waited.append(hub.batch_signal.somebody_waits_elsewhere)
        answer = next(answers, [])
        if isinstance(answer, Exception):
            raise answer
        return answer

    hub = SimpleNamespace(
        store=SimpleNamespace(is_shared=True, exchange=exchange, change_watchers=[]),
        presence=Presence(lambda: 0.0, list, lambda _: None),
        batch_signal=SimpleNamespace(somebody_waits_here=False, somebody_waits_elsewhere=False, ring=lambda: None),
        process_reports=SimpleNamespace(standings_here=list, elsewhere=[]),
        engine_table=EngineTable(lambda: 0.0),
    )

    async def until_exchanged() -> None:
        async with other_hubs.other_hubs(hub):
            async with asyncio.timeout(20):
                while len(waited) < 5:
                    await asyncio.sleep(0.001)

    asyncio.run(until_exchanged())
    assert waited[:5] == [False, True, False, True, False]
    assert hub.presence.seen_here_s() == {0: 0.5}


def test_an_environment_that_this_hub_has_not_heard_of_has_a_full_period(clock) -> None:
    presence = Presence(clock, list, lambda _: None, known=[0])
    clock.now_s += GONE_AFTER_S + 1
    assert not presence.is_alive(0), "registered before this hub started, and silent since"
    assert presence.is_alive(1)
    assert presence.seen_here_s() == {}, "other hubs must not hear that it is alive"
    clock.now_s += GONE_AFTER_S + 1
    assert not presence.is_alive(1)
