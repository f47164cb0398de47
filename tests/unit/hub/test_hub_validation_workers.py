"""The validation workers: real processes, that are killed while they work."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Awaitable, Callable
from functools import partial

import msgspec
import pytest

from treadle.hub.group_validation import ValidationRequest
from treadle.hub.messages import GroupRules, Refused
from treadle.hub.validation_workers import INLINE_BYTES, REQUESTS_PER_WORKER, ValidationWorkers, _Worker

ORDER = ValidationRequest(kind="group", rules=GroupRules())


def body(tag: int, num_tokens: int = 6000) -> bytes:
    tokens = [tag] * num_tokens
    packed = msgspec.json.encode({"tokens": [tokens], "masks": [tokens], "scores": [1.0]})
    assert len(packed) > INLINE_BYTES
    return packed


def at_work(num_workers: int, scenario: Callable[[ValidationWorkers], Awaitable[None]]) -> None:
    async def run() -> None:
        validators = ValidationWorkers(num_workers)
        await validators.start()
        try:
            async with asyncio.timeout(120):
                while len(validators.workers) < num_workers:
                    await asyncio.sleep(0.01)
                await scenario(validators)
        finally:
            await validators.close()

    asyncio.run(run())


def kill(worker: _Worker) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(worker.pid, signal.SIGKILL)


def test_answers_go_to_those_who_asked():
    async def scenario(validators: ValidationWorkers) -> None:
        admitted = await asyncio.gather(*(validators.admit(body(tag), ORDER) for tag in range(40)))
        assert [msgspec.json.decode(each.groups[0].payload)["tokens"][0][0] for each in admitted] == list(range(40))

    at_work(2, scenario)


def test_a_refusal_comes_back_as_one():
    async def scenario(validators: ValidationWorkers) -> None:
        with pytest.raises(Refused) as refused:
            await validators.admit(body(-1), ORDER)
        assert (refused.value.status, refused.value.reason) == (422, "negative_id")

    at_work(1, scenario)


def test_a_client_that_goes_away_leaves_the_others_their_answers():
    async def scenario(validators: ValidationWorkers) -> None:
        leaving = [asyncio.create_task(validators.admit(body(tag, 50_000), ORDER)) for tag in range(4)]
        await asyncio.sleep(0.01)
        for task in leaving:
            task.cancel()
        admitted = await asyncio.gather(*(validators.admit(body(tag), ORDER) for tag in range(10, 30)))
        assert [msgspec.json.decode(each.groups[0].payload)["tokens"][0][0] for each in admitted] == list(range(10, 30))

    at_work(1, scenario)


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_killed_worker_is_replaced_and_another_does_its_requests(num_workers):
    async def scenario(validators: ValidationWorkers) -> None:
        under_way = [asyncio.create_task(validators.admit(body(tag, 20_000), ORDER)) for tag in range(16)]
        await asyncio.sleep(0.02)
        (victim, *_) = validators.workers
        kill(victim)
        assert len(await asyncio.gather(*under_way)) == 16
        while victim in validators.workers or len(validators.workers) < num_workers:
            await asyncio.sleep(0.01)

    at_work(num_workers, scenario)


def test_workers_that_died_while_idle_are_no_fault_of_the_next_body():
    """The system may kill several at once when memory runs out."""

    async def scenario(validators: ValidationWorkers) -> None:
        for worker in list(validators.workers):
            kill(worker)
        await asyncio.sleep(0.2)
        for tag in range(8):
            assert (await validators.admit(body(tag), ORDER)).groups

    at_work(3, scenario)


@pytest.mark.parametrize("num_neighbours", [1, 12])
def test_only_the_body_that_kills_workers_is_refused(monkeypatch, num_neighbours):
    """A worker that has begun to read this body is killed; the body is recognised by its content."""
    validate = _Worker.validate
    deadly = body(1, 500_000)

    async def judge_or_die(self: _Worker, content: bytes, order: ValidationRequest):
        async def die_of_it(place: int) -> None:
            await asyncio.sleep(0)  # the order is in its hands by now
            mine = self._answers[place]
            while not (self._has_begun and self._answers and self._answers[0] is mine):
                await asyncio.sleep(0)
            kill(self)

        death = asyncio.create_task(die_of_it(len(self._answers))) if content == deadly else None
        try:
            return await validate(self, content, order)
        finally:
            if death is not None:
                death.cancel()

    monkeypatch.setattr(_Worker, "validate", judge_or_die)

    async def scenario(validators: ValidationWorkers) -> None:
        outcomes = await asyncio.gather(
            validators.admit(deadly, ORDER),
            *(validators.admit(body(tag), ORDER) for tag in range(num_neighbours)),
            return_exceptions=True,
        )
        assert isinstance(outcomes[0], Refused)
        assert outcomes[0].status == 413
        assert not [outcome for outcome in outcomes[1:] if isinstance(outcome, BaseException)]

    at_work(1, scenario)


def test_the_hub_survives_a_temporary_failure_to_start_workers(monkeypatch):
    start = _Worker.start
    failures = iter([True, True])

    async def start_or_fail() -> _Worker:
        if next(failures, False):
            raise OSError("cannot allocate memory")
        return await start()

    async def scenario(validators: ValidationWorkers) -> None:
        monkeypatch.setattr(_Worker, "start", start_or_fail)
        for worker in list(validators.workers):
            kill(worker)
        await asyncio.sleep(0.2)
        with contextlib.suppress(OSError, Refused):
            await validators.admit(body(1), ORDER)
        for _ in range(20):
            with contextlib.suppress(OSError, Refused, TimeoutError):
                async with asyncio.timeout(1):
                    await validators.admit(body(2), ORDER)
                    return
        raise AssertionError("no worker ever came back")

    at_work(1, scenario)


@pytest.fixture
def patience(monkeypatch) -> Callable[[Callable[[float], None]], None]:
    """Runs a test with factors for SILENT_S and its own times: on a busy machine, workers that work may be taken for
    ones that hang with the small factor."""

    def run(test: Callable[[float], None]) -> None:
        for factor in (1.0, 5.0):
            monkeypatch.setattr("treadle.hub.validation_workers.SILENT_S", 1.5 * factor)
            try:
                test(factor)
            except (AssertionError, Refused):
                if factor > 1:
                    raise
            else:
                break

    return run


def test_a_hanging_worker_is_replaced_and_its_jobs_are_repeated(patience):
    async def scenario(validators: ValidationWorkers) -> None:
        (stopped,) = validators.workers
        os.kill(stopped.pid, signal.SIGSTOP)
        sizes = (2_000_000, 6000, 6000, 6000, 6000, 6000)  # the first does not fit into what the system keeps for it
        admitted = await asyncio.gather(*(validators.admit(body(tag, size), ORDER) for tag, size in enumerate(sizes)))
        assert len(admitted) == 6
        assert stopped not in validators.workers

    patience(lambda _: at_work(1, scenario))


def test_a_body_that_takes_too_much_cpu_time_is_refused_at_once():
    """Its worker is ended, once; the order behind it is done by the next one."""

    async def scenario(validators: ValidationWorkers) -> None:
        (victim,) = validators.workers
        hasty = ValidationRequest(kind="group", rules=GroupRules(), max_cpu_s=0.02)
        costly, other = await asyncio.gather(
            validators.admit(body(1, 3_000_000), hasty), validators.admit(body(2), ORDER), return_exceptions=True
        )
        assert isinstance(costly, Refused)
        assert (costly.status, costly.reason) == (413, "too_costly")
        assert costly.detail == "the body takes more than 0.02 s to check: send fewer groups at once"
        assert not isinstance(other, BaseException)
        assert await victim.end() == -signal.SIGPROF
        assert (await validators.admit(body(3), ORDER)).groups

    at_work(1, scenario)


def test_a_worker_that_works_is_not_taken_for_one_that_hangs(monkeypatch, patience):
    """Orders wait for the one before: the time is counted from the last sign of life."""

    async def scenario(factor: float, validators: ValidationWorkers) -> None:
        (worker,) = validators.workers
        read = worker._reader.readexactly

        async def read_late(num_bytes: int) -> bytes:  # three times for each order
            await asyncio.sleep(0.4 * factor)
            return await read(num_bytes)

        monkeypatch.setattr(worker._reader, "readexactly", read_late)
        admitted = await asyncio.gather(*(validators.admit(body(tag), ORDER) for tag in range(REQUESTS_PER_WORKER)))
        assert len(admitted) == REQUESTS_PER_WORKER
        assert worker._process.returncode is None

    patience(lambda factor: at_work(1, partial(scenario, factor)))


def test_an_answer_that_cannot_be_read_keeps_nobody_waiting(monkeypatch):
    class Unreadable:
        def decode(self, _: bytes) -> None:
            raise msgspec.DecodeError("garbled")

    monkeypatch.setattr("treadle.hub.validation_workers.RESULTS", Unreadable())

    async def scenario(validators: ValidationWorkers) -> None:
        with pytest.raises(Refused) as refused:
            await validators.admit(body(1), ORDER)
        assert refused.value.status == 413

    at_work(1, scenario)


def test_a_worker_that_has_ended_is_not_killed_again(monkeypatch):
    async def scenario(validators: ValidationWorkers) -> None:
        (worker,) = validators.workers
        assert await worker.end() == -signal.SIGKILL
        monkeypatch.setattr(worker, "kill", lambda: pytest.fail("its number may be that of another process"))
        assert await worker.end() == -signal.SIGKILL

    at_work(1, scenario)
