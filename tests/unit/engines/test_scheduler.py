"""Waves, pauses and failures, with the real engine on a small model."""

from __future__ import annotations

import threading
import time

import pytest

from tests.tiny_model import write_tiny_model
from treadle.config import EngineConfig
from treadle.engines import scheduler as scheduler_module
from treadle.engines.sampling import SamplingParams
from treadle.engines.scheduler import Scheduler
from treadle.engines.transformers_engine import Request, TransformersEngine
from treadle.errors import EngineError
from treadle.wire.generate import Wave


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def scheduler(folder):
    made = Scheduler(TransformersEngine(EngineConfig(dtype="float32", threads=1), folder), max_num_seqs=8)
    yield made
    made.stop()
    made.join()


def ask(seed=0, n=1, max_tokens=8):
    return Request([5, 6, 7], n, max_tokens, SamplingParams(), seed, [], set())


def wave(index, size=3, id="w"):
    return Wave(id=id, size=size, index=index)


def test_a_wave_waits_for_its_last_member(scheduler):
    first = [scheduler.submit(ask(i), wave(i)) for i in (2, 0)]
    time.sleep(0.3)
    assert not any(f.done() for f in first)
    assert scheduler.num_running == 0
    last = scheduler.submit(ask(1), wave(1))
    for future in (*first, last):
        assert len(future.result(30).sequences[0].token_ids) == 8


def test_a_wave_whose_last_member_never_comes_is_generated_without_it(scheduler, monkeypatch):
    monkeypatch.setattr(scheduler_module, "WAVE_PATIENCE_S", 0.5)
    assert scheduler.submit(ask(), wave(0, size=2)).result(30)


def test_a_wave_larger_than_the_engine_is_generated_in_parts(scheduler):
    futures = [scheduler.submit(ask(i, n=3), wave(i, size=7)) for i in range(7)]
    assert all(len(f.result(60).sequences) == 3 for f in futures)


def test_other_requests_pass_a_wave_that_waits(scheduler):
    waiting = scheduler.submit(ask(), wave(0, size=2))
    assert scheduler.submit(ask(), None).result(30)
    assert not waiting.done()


def test_a_client_that_comes_back_replaces_its_old_request(scheduler):
    old = scheduler.submit(ask(), wave(0, size=2))
    new = scheduler.submit(ask(), wave(0, size=2))
    with pytest.raises(EngineError, match="replaced"):
        old.result(5)
    scheduler.submit(ask(), wave(1, size=2)).result(30)
    assert new.result(30)


def test_pause_lets_what_runs_finish_and_holds_the_rest(scheduler):
    running = scheduler.submit(ask(max_tokens=60), None)
    while scheduler.num_running == 0:
        time.sleep(0.001)
    scheduler.pause(30)
    assert running.done()
    assert running.result().policy_version == 0
    held = scheduler.submit(ask(), None)
    time.sleep(0.2)
    assert not held.done()
    scheduler.resume(7)
    assert held.result(30).policy_version == 7


def test_a_pause_that_takes_too_long_is_given_up(scheduler):
    futures = [scheduler.submit(ask(max_tokens=200), None) for _ in range(8)]
    while scheduler.num_running == 0:
        time.sleep(0.001)
    with pytest.raises(EngineError, match="still running"):
        scheduler.pause(0.01)
    assert not scheduler.is_paused
    assert all(f.result(60) for f in futures)


def test_a_failure_is_told_to_everyone_and_to_the_health_check(scheduler):
    def broken(_):
        raise RuntimeError("out of memory")

    scheduler._engine.admit = broken
    future = scheduler.submit(ask(), None)
    with pytest.raises(EngineError, match="RuntimeError"):
        future.result(10)
    assert scheduler.failure == "RuntimeError"
    with pytest.raises(EngineError, match="ended"):
        scheduler.submit(ask(), None)
    with pytest.raises(EngineError, match="ended"):
        scheduler.pause(1)


def test_stopping_answers_those_who_wait(scheduler):
    waiting = scheduler.submit(ask(), wave(0, size=2))
    threading.Timer(0.1, scheduler.stop).start()
    with pytest.raises(EngineError, match="shutting down"):
        waiting.result(10)
