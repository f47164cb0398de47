from __future__ import annotations

import asyncio
import contextlib
import json
import time

import msgspec
import pytest

from treadle.hub import observer_routes as events
from treadle.hub.observer_routes import EventStream
from treadle.hub.state import BatchSignal
from treadle.store import Store, runs
from treadle.wire.hub import HubEvent, RegisterEnv


class Reader:
    """Takes a stream of events apart, as a browser's EventSource does."""

    def __init__(self, chunks) -> None:
        self._chunks = chunks
        self._lines: list[bytes] = []

    async def next(self) -> tuple[str, int | None, dict]:
        while True:
            fields = {}
            while line := await self._line():
                name, _, value = line.partition(b": ")
                fields[name] = value
            if b"data" in fields:
                number = int(fields[b"id"]) if b"id" in fields else None
                return fields[b"event"].decode(), number, json.loads(fields[b"data"])

    async def ids(self, count: int) -> list[int | None]:
        return [(await self.next())[1] for _ in range(count)]

    async def _line(self) -> bytes:
        while not self._lines:
            self._lines = (await anext(self._chunks)).split(b"\n")[:-1]
        return self._lines.pop(0)


@contextlib.asynccontextmanager
async def event_stream_of(store):
    signal = BatchSignal()
    event_stream = EventStream(store, signal)
    async with event_stream.open(), asyncio.timeout(60):
        yield event_stream, signal


def happen(store: Store, count: int = 1) -> None:
    env = RegisterEnv(max_token_length=9, desired_name="a", weight=1.0, group_size=2)
    for _ in range(count):
        store.write(runs.register_env, env, resume=True, idle_s=lambda _: 0.0, gone_after_s=9.0).result()


def test_event_streams_start_at_the_end_or_after_the_given_id(store):
    async def read():
        happen(store, 3)
        async with event_stream_of(store) as (event_stream, _):
            new, old, all_of_them = (Reader(event_stream.stream(last)) for last in (None, 1, 0))
            first_new = asyncio.create_task(new.next())
            assert await old.ids(2) == [2, 3]
            assert await all_of_them.ids(3) == [1, 2, 3]
            await asyncio.sleep(0)
            happen(store)
            kind, number, data = await first_new
            assert (kind, number) == ("env_registered", 4)
            event = msgspec.convert(data, HubEvent)
            assert (event.id, event.kind, event.data) == (4, "env_registered", {"env_id": 0, "name": "a_0"})
            assert abs(event.at - time.time()) < 60
            assert await old.ids(1) == [4]

    asyncio.run(read())


def test_a_reader_is_woken_by_the_commit_itself(store):
    async def read():
        async with event_stream_of(store) as (event_stream, _):
            reader = Reader(event_stream.stream(None))
            waits = asyncio.create_task(reader.next())
            await asyncio.sleep(0.05)
            began = time.monotonic()
            store.write(runs.disconnect_env, 7)  # a commit without an event
            await asyncio.to_thread(happen, store)
            await waits
            return time.monotonic() - began

    assert asyncio.run(read()) < 5.0  # not the next heartbeat


def test_a_commit_does_not_wake_those_who_wait_for_a_batch(store):
    async def read():
        async with event_stream_of(store) as (event_stream, signal):
            was_signalled = signal.event
            reader = Reader(event_stream.stream(0))
            await asyncio.to_thread(happen, store, 3)
            await reader.ids(3)
            assert not was_signalled.is_set()

    asyncio.run(read())


def test_a_gap_is_sent_first_for_events_that_are_no_longer_kept(store, monkeypatch):
    monkeypatch.setattr(runs, "EVENTS_KEPT", 5)
    monkeypatch.setattr(runs, "PRUNE_EVENTS_EVERY", 10)
    happen(store, 10)

    async def read():
        async with event_stream_of(store) as (event_stream, _):
            reader = Reader(event_stream.stream(2))
            assert await reader.next() == ("gap", None, {"oldest": 6})
            assert await reader.ids(5) == [6, 7, 8, 9, 10]
            assert await Reader(event_stream.stream(5)).ids(1) == [6]  # nothing between is missing

    asyncio.run(read())


def test_a_reader_that_falls_too_far_behind_gets_a_gap(store, monkeypatch):
    monkeypatch.setattr(runs, "EVENTS_KEPT", 5)
    monkeypatch.setattr(runs, "PRUNE_EVENTS_EVERY", 10)
    monkeypatch.setattr(events, "PAGE", 2)

    async def read():
        happen(store, 3)
        async with event_stream_of(store) as (event_stream, _):
            reader = Reader(event_stream.stream(0))
            assert await reader.ids(2) == [1, 2]
            happen(store, 17)
            assert await reader.next() == ("gap", None, {"oldest": 16})
            assert await reader.ids(5) == [16, 17, 18, 19, 20]

    asyncio.run(read())


def test_an_id_of_another_queue_is_a_gap_and_not_silence(store):
    async def read():
        happen(store, 2)
        async with event_stream_of(store) as (event_stream, _):
            reader = Reader(event_stream.stream(500))
            assert await reader.next() == ("gap", None, {"oldest": 1})
            assert await reader.ids(2) == [1, 2]

    asyncio.run(read())


def test_many_events_are_read_page_by_page(store):
    happen(store, 1203)

    async def read():
        async with event_stream_of(store) as (event_stream, _):
            sizes = []
            async for chunk in event_stream.stream(0):
                sizes.append(chunk.count(b"id: "))
                if sum(sizes) == 1203:
                    return sizes
        return []

    assert asyncio.run(read()) == [0, 500, 500, 203]


def test_a_silent_stream_has_a_heartbeat(store):
    async def read():
        async with event_stream_of(store) as (event_stream, _):
            stream = event_stream.stream(None, heartbeat_s=0.01)
            assert await anext(stream) == b"retry: 1000\n\n"
            for _ in range(3):
                assert (await anext(stream)).startswith(b": ")
            await stream.aclose()
            assert event_stream.num_readers == 0

    asyncio.run(read())


def test_a_stream_ends_with_the_hub_after_what_was_still_to_tell(store):
    async def read():
        async with event_stream_of(store) as (event_stream, signal):
            reader = Reader(event_stream.stream(0))
            waits = asyncio.create_task(reader.next())
            await asyncio.sleep(0.02)
            happen(store)
            signal.close()
            assert (await waits)[1] == 1
            with pytest.raises(StopAsyncIteration):
                await reader.next()

    asyncio.run(read())


@pytest.mark.parametrize(("headers", "query"), [({"Last-Event-ID": "x"}, ""), ({}, "?after=-1"), ({}, "?after=1e3")])
def test_an_id_that_is_none_is_422(client, headers, query):
    answer = client.get(f"/v1/events{query}", headers=headers)
    assert answer.status_code == 422
    assert answer.json()["detail"][0]["loc"] in (["header", "Last-Event-ID"], ["query", "after"])
