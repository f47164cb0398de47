"""The door workers: real processes, that are killed while they work."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Awaitable, Callable

import msgspec
import pytest

from treadle.hub.checks import Rules
from treadle.hub.door import Order
from treadle.hub.porters import IN_HAND, INLINE_BYTES, Porters, _Porter
from treadle.hub.refusals import Refused

ORDER = Order(kind="group", rules=Rules())


def body(tag: int, num_tokens: int = 6000) -> bytes:
    tokens = [tag] * num_tokens
    packed = msgspec.json.encode({"tokens": [tokens], "masks": [tokens], "scores": [1.0]})
    assert len(packed) > INLINE_BYTES
    return packed


def at_work(num_porters: int, play: Callable[[Porters], Awaitable[None]]) -> None:
    async def run() -> None:
        porters = Porters(num_porters)
        await porters.start()
        try:
            async with asyncio.timeout(60):
                while len(porters.at_work) < num_porters:
                    await asyncio.sleep(0.01)
                await play(porters)
        finally:
            await porters.close()

    asyncio.run(run())


def kill(porter: _Porter) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(porter._process.pid, signal.SIGKILL)


def test_answers_go_to_those_who_asked():
    async def play(porters: Porters) -> None:
        admitted = await asyncio.gather(*(porters.admit(body(tag), ORDER) for tag in range(40)))
        assert [msgspec.json.decode(each.groups[0].payload)["tokens"][0][0] for each in admitted] == list(range(40))

    at_work(2, play)


def test_a_refusal_comes_back_as_one():
    async def play(porters: Porters) -> None:
        with pytest.raises(Refused) as refused:
            await porters.admit(body(-1), ORDER)
        assert (refused.value.status, refused.value.reason) == (422, "negative_id")

    at_work(1, play)


def test_a_client_that_goes_away_leaves_the_others_their_answers():
    async def play(porters: Porters) -> None:
        leaving = [asyncio.create_task(porters.admit(body(tag, 50_000), ORDER)) for tag in range(4)]
        await asyncio.sleep(0.01)
        for task in leaving:
            task.cancel()
        admitted = await asyncio.gather(*(porters.admit(body(tag), ORDER) for tag in range(10, 30)))
        assert [msgspec.json.decode(each.groups[0].payload)["tokens"][0][0] for each in admitted] == list(range(10, 30))

    at_work(1, play)


@pytest.mark.parametrize("num_porters", [1, 2])
def test_a_killed_porter_is_replaced_and_its_orders_are_done_by_another(num_porters):
    async def play(porters: Porters) -> None:
        under_way = [asyncio.create_task(porters.admit(body(tag, 20_000), ORDER)) for tag in range(16)]
        await asyncio.sleep(0.02)
        (victim, *_) = porters.at_work
        kill(victim)
        assert len(await asyncio.gather(*under_way)) == 16
        while victim in porters.at_work or len(porters.at_work) < num_porters:
            await asyncio.sleep(0.01)

    at_work(num_porters, play)


def test_porters_that_died_while_idle_are_no_fault_of_the_next_body():
    """The system may kill several at once when memory runs out."""

    async def play(porters: Porters) -> None:
        for porter in list(porters.at_work):
            kill(porter)
        await asyncio.sleep(0.2)
        for tag in range(8):
            assert (await porters.admit(body(tag), ORDER)).groups

    at_work(3, play)


@pytest.mark.parametrize("num_neighbours", [1, 12])
def test_a_body_that_takes_porters_with_it_is_refused_and_its_neighbours_are_not(monkeypatch, num_neighbours):
    """The deadly one is told by its content; a porter that has begun to read it is killed."""
    judge = _Porter.judge
    deadly = body(1, 500_000)

    async def judge_or_die(self: _Porter, content: bytes, order: Order):
        async def die_of_it(place: int) -> None:
            await asyncio.sleep(0)  # the order is in its hands by now
            mine = self._answers[place]
            while not (self._has_begun and self._answers and self._answers[0] is mine):
                await asyncio.sleep(0)
            kill(self)

        death = asyncio.create_task(die_of_it(len(self._answers))) if content == deadly else None
        try:
            return await judge(self, content, order)
        finally:
            if death is not None:
                death.cancel()

    monkeypatch.setattr(_Porter, "judge", judge_or_die)

    async def play(porters: Porters) -> None:
        outcomes = await asyncio.gather(
            porters.admit(deadly, ORDER),
            *(porters.admit(body(tag), ORDER) for tag in range(num_neighbours)),
            return_exceptions=True,
        )
        assert isinstance(outcomes[0], Refused)
        assert outcomes[0].status == 413
        assert not [outcome for outcome in outcomes[1:] if isinstance(outcome, BaseException)]

    at_work(1, play)


def test_a_machine_that_cannot_start_a_process_for_a_while_does_not_stop_the_hub(monkeypatch):
    start = _Porter.start
    failures = iter([True, True])

    async def start_or_fail() -> _Porter:
        if next(failures, False):
            raise OSError("cannot allocate memory")
        return await start()

    async def play(porters: Porters) -> None:
        monkeypatch.setattr(_Porter, "start", start_or_fail)
        for porter in list(porters.at_work):
            kill(porter)
        await asyncio.sleep(0.2)
        with contextlib.suppress(OSError, Refused):
            await porters.admit(body(1), ORDER)
        for _ in range(20):
            with contextlib.suppress(OSError, Refused, TimeoutError):
                async with asyncio.timeout(1):
                    await porters.admit(body(2), ORDER)
                    return
        raise AssertionError("no porter ever came back")

    at_work(1, play)


def test_a_porter_that_hangs_is_replaced_and_its_orders_are_done_by_another(monkeypatch):
    monkeypatch.setattr("treadle.hub.porters.SILENT_S", 1.5)

    async def play(porters: Porters) -> None:
        (stopped,) = porters.at_work
        os.kill(stopped.pid, signal.SIGSTOP)
        sizes = (2_000_000, 6000, 6000, 6000, 6000, 6000)  # the first does not fit into what the system keeps for it
        admitted = await asyncio.gather(*(porters.admit(body(tag, size), ORDER) for tag, size in enumerate(sizes)))
        assert len(admitted) == 6
        assert stopped not in porters.at_work

    at_work(1, play)


def test_a_body_that_takes_too_much_cpu_time_is_refused_at_once():
    """Its porter is ended, once; the order behind it is done by the next one."""

    async def play(porters: Porters) -> None:
        (victim,) = porters.at_work
        hasty = Order(kind="group", rules=Rules(), max_cpu_s=0.02)
        costly, other = await asyncio.gather(
            porters.admit(body(1, 3_000_000), hasty), porters.admit(body(2), ORDER), return_exceptions=True
        )
        assert isinstance(costly, Refused)
        assert (costly.status, costly.reason) == (413, "too_costly")
        assert costly.detail == "the body takes more than 0.02 s to check: send fewer groups at once"
        assert not isinstance(other, BaseException)
        assert await victim.exit_code() == -signal.SIGPROF
        assert (await porters.admit(body(3), ORDER)).groups

    at_work(1, play)


def test_a_porter_that_works_is_not_taken_for_one_that_hangs(monkeypatch):
    """Orders wait for the one before: the time is counted from the last sign of life."""
    monkeypatch.setattr("treadle.hub.porters.SILENT_S", 1.5)

    async def play(porters: Porters) -> None:
        (porter,) = porters.at_work
        read = porter._reader.readexactly

        async def read_late(num_bytes: int) -> bytes:  # three times for each order
            await asyncio.sleep(0.4)
            return await read(num_bytes)

        monkeypatch.setattr(porter._reader, "readexactly", read_late)
        admitted = await asyncio.gather(*(porters.admit(body(tag), ORDER) for tag in range(IN_HAND)))
        assert len(admitted) == IN_HAND
        assert porter._process.returncode is None

    at_work(1, play)


def test_an_answer_that_cannot_be_read_keeps_nobody_waiting(monkeypatch):
    class Unreadable:
        def decode(self, _: bytes) -> None:
            raise msgspec.DecodeError("garbled")

    monkeypatch.setattr("treadle.hub.porters.VERDICTS", Unreadable())

    async def play(porters: Porters) -> None:
        with pytest.raises(Refused) as refused:
            await porters.admit(body(1), ORDER)
        assert refused.value.status == 413

    at_work(1, play)
