"""The gate: an engine stands still while a trainer writes, and is told when that trainer ends."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from treadle.errors import SyncError
from treadle.sync.gate import Gate, gate_beside, is_written, new_number

TRAINER_THAT_ENDS = """
import sys, time
from pathlib import Path
from treadle.sync.gate import Gate
with Gate(Path(sys.argv[1])).publishing():
    print("publishing", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def path(tmp_path):
    path = gate_beside(tmp_path / "m.weights")
    Gate.create(path)
    return path


def test_what_is_written_while_it_stands_still_is_seen_when_it_goes_on(path):
    written, seen = [], []
    number = new_number()
    trainer, engine = Gate(path), Gate(path)  # two mappings, as two processes have

    def stand():
        seen.append((engine.stand_still(number), list(written)))

    worker = threading.Thread(target=stand)
    worker.start()
    assert trainer.wait_until_still(number, is_over=lambda: False)
    time.sleep(0.05)
    written.append("weights")
    trainer.go_on(number)
    worker.join(5)
    ((seconds, then),) = seen
    assert then == ["weights"]
    assert 0.05 <= seconds < 1.0


def test_what_is_left_of_an_earlier_publish_does_not_count(path):
    trainer, engine = Gate(path), Gate(path)
    first, second = new_number(), new_number()
    trainer.go_on(first)
    engine.stand_still(first)
    with ThreadPoolExecutor() as pool:
        standing = pool.submit(engine.stand_still, second)
        time.sleep(0.1)
        assert not standing.done()
        trainer.go_on(second)
        standing.result(5)


def test_a_trainer_learns_that_the_engine_will_not_come(path):
    assert not Gate(path).wait_until_still(new_number(), is_over=lambda: True)


def test_a_trainer_that_is_given_up_ends_the_standing(path):
    engine, number = Gate(path), new_number()
    with ThreadPoolExecutor() as pool:
        standing = pool.submit(engine.stand_still, number)
        Gate(path).give_up(number)
        with pytest.raises(SyncError, match="did not finish writing") as error:
            standing.result(5)
    assert "--resume" in error.value.fix


def test_two_trainers_do_not_publish_at_once(path):
    with Gate(path).publishing():
        with pytest.raises(SyncError, match="another trainer publishes"), Gate(path).publishing():
            pass
        assert Gate(path).has_trainer
    assert not Gate(path).has_trainer
    with Gate(path).publishing():
        pass


def test_the_death_of_a_trainer_is_seen_at_once(path):
    trainer = subprocess.Popen([sys.executable, "-c", TRAINER_THAT_ENDS, str(path)], stdout=subprocess.PIPE, text=True)
    try:
        assert trainer.stdout
        assert trainer.stdout.readline() == "publishing\n"

        async def look():
            standing = asyncio.get_running_loop().create_future()
            asyncio.get_running_loop().call_later(0.7, trainer.kill)
            started = time.monotonic()
            return await is_written(standing, Gate(path), new_number(), timeout_s=30), time.monotonic() - started

        written, seconds = asyncio.run(look())
        assert not written
        assert 0.6 < seconds < 5
    finally:
        trainer.kill()
        trainer.wait()


def test_a_trainer_that_has_written_may_leave_before_the_engine_has_gone_on(path):
    number = new_number()

    async def look():
        standing = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_later(1.2, standing.set_result, 0.1)  # longer than it takes to look twice
        return await is_written(standing, Gate(path), number, timeout_s=30)

    with Gate(path).publishing():
        Gate(path).go_on(number)
    assert asyncio.run(look())


def test_a_trainer_that_takes_too_long_is_given_up(path):
    async def look():
        return await is_written(asyncio.get_running_loop().create_future(), Gate(path), new_number(), timeout_s=0.6)

    with Gate(path).publishing():
        assert not asyncio.run(look())


def test_a_gate_that_is_not_there_is_named(tmp_path):
    with pytest.raises(SyncError, match="cannot map the engine's gate"):
        Gate(tmp_path / "no.gate")
