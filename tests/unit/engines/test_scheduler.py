"""Waves, holds and failures of the scheduler, with a real small model."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from tests.tiny_model import write_tiny_model
from treadle.config import EngineConfig
from treadle.engines import request_queue
from treadle.engines.interface import Adapter, Request
from treadle.engines.lora import read_adapter
from treadle.engines.model_runner import ModelRunner
from treadle.engines.sampling import SamplingParams
from treadle.engines.scheduler import Scheduler
from treadle.errors import EngineError
from treadle.support import fast_dtype
from treadle.wire.generate import Wave


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def scheduler(folder):
    made = Scheduler(ModelRunner(EngineConfig(dtype="float32", threads=1), folder), max_num_seqs=8)
    yield made
    made.stop()
    made.join()


def ask(seed=0, n=1, max_tokens=8, wave=None, **more):
    return Request([5, 6, 7], n, max_tokens, SamplingParams(), seed, ignore_eos=True, wave=wave, **more)


def wave(index, size=3, id="w"):
    return Wave(id=id, size=size, index=index)


def test_a_wave_waits_for_its_last_member(scheduler):
    first = [scheduler.submit(ask(i, wave=wave(i))) for i in (2, 0)]
    time.sleep(0.3)
    assert not any(f.done() for f in first)
    assert scheduler.status().num_running == 0
    last = scheduler.submit(ask(1, wave=wave(1)))
    for future in (*first, last):
        assert len(future.result(30).completions[0].token_ids) == 8


def test_waves_that_never_complete_are_dropped(monkeypatch):
    monkeypatch.setattr(request_queue, "WAVE_TIMEOUT_S", 0.0)
    line = request_queue.RequestQueue()
    for number in range(request_queue.MAX_PARTIAL_WAVES + 50):
        line.append(request_queue.QueuedRequest(ask(wave=wave(0, size=2, id=str(number))), None))
        assert len(line.take(8, lambda *_: True)) == 1
    assert len(line._admitted_of_wave) == request_queue.MAX_PARTIAL_WAVES


def test_a_wave_whose_last_member_never_comes_is_generated_without_it(scheduler, monkeypatch):
    monkeypatch.setattr(request_queue, "WAVE_TIMEOUT_S", 0.5)
    assert scheduler.submit(ask(wave=wave(0, size=2))).result(30)


def test_a_wave_larger_than_the_engine_is_generated_in_parts(scheduler):
    futures = [scheduler.submit(ask(i, n=3, wave=wave(i, size=7))) for i in range(7)]
    assert all(len(f.result(60).completions) == 3 for f in futures)


def test_other_requests_pass_a_wave_that_waits(scheduler):
    waiting = scheduler.submit(ask(wave=wave(0, size=2)))
    assert scheduler.submit(ask()).result(30)
    assert not waiting.done()


def test_a_client_that_comes_back_replaces_its_old_request(scheduler):
    old = scheduler.submit(ask(wave=wave(0, size=2)))
    new = scheduler.submit(ask(wave=wave(0, size=2)))
    with pytest.raises(EngineError, match="replaced"):
        old.result(5)
    scheduler.submit(ask(wave=wave(1, size=2))).result(30)
    assert new.result(30)


def test_pause_lets_what_runs_finish_and_holds_the_rest(scheduler):
    running = scheduler.submit(ask(max_tokens=200))
    while scheduler.status().num_running == 0:
        assert not running.done()
        time.sleep(0.001)
    scheduler.hold("wait", 60)
    assert running.done()
    assert running.result().completions[0].policy_versions == [0]
    held = scheduler.submit(ask())
    time.sleep(0.2)
    assert not held.done()
    scheduler.release(7)
    assert held.result(30).completions[0].policy_versions == [7]


def test_a_pause_that_times_out_is_undone(scheduler):
    futures = [scheduler.submit(ask(max_tokens=200)) for _ in range(8)]
    while scheduler.status().num_running == 0:
        assert not any(future.done() for future in futures)
        time.sleep(0.001)
    with pytest.raises(EngineError, match="still running"):
        scheduler.hold("wait", 0.01)
    assert not scheduler.status().is_held
    assert all(f.result(60) for f in futures)


class Panic(BaseException):
    """Like the exceptions of libraries in Rust."""


@pytest.mark.parametrize("kind", [RuntimeError, Panic])
def test_a_failure_reaches_all_requests_and_the_health_check(scheduler, kind):
    def broken(*_, **__):
        raise kind("out of memory")

    scheduler.runner.admit = broken
    future = scheduler.submit(ask())
    with pytest.raises(EngineError, match=kind.__name__):
        future.result(10)
    assert scheduler.failure == kind.__name__
    with pytest.raises(EngineError, match="ended"):
        scheduler.submit(ask())
    with pytest.raises(EngineError, match="ended"):
        scheduler.hold("wait", 1)


def test_stopping_fails_waiting_requests(scheduler):
    waiting = scheduler.submit(ask(wave=wave(0, size=2)))
    threading.Timer(0.1, scheduler.stop).start()
    with pytest.raises(EngineError, match="shutting down"):
        waiting.result(10)


# Holds


def wait_until_running(scheduler):
    deadline = time.monotonic() + 10
    while not (scheduler._running and scheduler._running[0].sequences):
        assert time.monotonic() < deadline
        time.sleep(0.001)


def shake(engine, seed):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in engine.weights.values():
            weight.add_(torch.randn(weight.shape, generator=generator) * 0.05)


def plain_logprobs(weights, folder, token_ids):
    """Logprobs of a plain model with these weights, at each position."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(weights[name])
        return torch.log_softmax(model(torch.tensor([token_ids])).logits[0], -1)


def copied(engine):
    return {name: weight.detach().clone() for name, weight in engine.weights.items()}


def test_after_a_hold_every_token_comes_from_the_new_weights_alone(scheduler, folder):
    """Two running requests of different lengths, two publishes: each logprob equals that of a fresh full forward."""
    weights = {0: copied(scheduler.runner)}
    futures = [scheduler.submit(ask(seed, n=2, max_tokens=150)) for seed in (1, 2)]
    wait_until_running(scheduler)
    for version in (4, 5):
        scheduler.hold("keep", 30)
        assert scheduler.status().num_running == 2
        shake(scheduler.runner, version)
        weights[version] = copied(scheduler.runner)
        counts = [len(s.token_ids) for job in scheduler._running for s in job.sequences]
        scheduler.release(version)
        deadline = time.monotonic() + 10
        while [len(s.token_ids) for job in scheduler._running for s in job.sequences] == counts:
            assert time.monotonic() < deadline
            time.sleep(0.001)
    for future in futures:
        for s in future.result(60).completions:
            assert s.policy_versions == [0, 4, 5]
            tables = {v: plain_logprobs(weights[v], folder, [5, 6, 7, *s.token_ids]) for v in weights}
            versions = iter((0, 4, 5))
            version = next(versions)
            for t, (token, logprob) in enumerate(zip(s.token_ids, s.logprobs, strict=True)):
                if abs(tables[version][2 + t, token] - logprob) >= 1e-4:  # here the next version must have begun
                    version = next(versions)
                assert abs(tables[version][2 + t, token] - logprob) < 1e-4
            assert version == 5


def test_no_token_is_sampled_while_held_and_none_is_lost(scheduler):
    alone = scheduler.submit(ask(3, max_tokens=100)).result(30).completions[0]
    future = scheduler.submit(ask(3, max_tokens=100))
    wait_until_running(scheduler)
    scheduler.hold("keep", 30)
    so_far = len(scheduler._running[0].sequences[0].token_ids)
    time.sleep(0.1)
    assert len(scheduler._running[0].sequences[0].token_ids) == so_far < 100
    scheduler.release(None)
    held = future.result(30).completions[0]
    assert (held.token_ids, held.logprobs, held.policy_versions) == (alone.token_ids, alone.logprobs, [0])


def test_a_wave_is_finished_before_a_hold(scheduler):
    """Its tokens must not depend on the moment of a publish."""
    futures = [scheduler.submit(ask(i, max_tokens=60, wave=wave(i, size=2))) for i in range(2)]
    wait_until_running(scheduler)
    scheduler.hold("keep", 30)
    scheduler.release(9)
    assert [f.result(0).completions[0].policy_versions for f in futures] == [[0], [0]]


def test_a_frozen_engine_stays_frozen_in_every_hold_mode(scheduler):
    future = scheduler.submit(ask(max_tokens=200))
    wait_until_running(scheduler)
    scheduler.hold("keep", 30)
    scheduler.hold("wait", 30)  # by a trainer that came back: the weights may be half written
    assert not future.done()
    scheduler.hold("abort", 30)
    assert future.result(5).completions[0].finish_reason == "abort"
    assert scheduler.status().is_held
    scheduler.release(None)
    assert scheduler.submit(ask()).result(30)


def test_weights_do_not_change_under_an_engine_that_is_not_held(scheduler):
    with pytest.raises(EngineError, match="only while the engine is paused"):
        scheduler.release(3)
    assert scheduler.policy_version == 0


# Requests for one token, streams, and clients that leave


def test_a_request_for_one_token_changes_no_bit_of_what_runs(folder):
    """Such a request is the canary of a publish, which comes at a random moment."""
    runs = []
    for has_canary in (False, True):
        config = EngineConfig(dtype=fast_dtype("cpu"), threads=1)
        scheduler = Scheduler(ModelRunner(config, folder), max_num_seqs=8)
        futures = [scheduler.submit(ask(i, n=3, max_tokens=40, wave=wave(i, size=2))) for i in range(2)]
        if has_canary:
            wait_until_running(scheduler)
            canary = scheduler.submit(ask(9, max_tokens=1, num_prompt_top=1)).result(30)
            assert not any(f.done() for f in futures)
            assert [len(top) > 0 for top in canary.prompt_tops] == [False, True, True]
            assert canary.completions[0].finish_reason == "length"
        runs.append([(s.token_ids, s.logprobs) for f in futures for s in f.result(30).completions])
        scheduler.stop()
        scheduler.join()
    assert runs[0] == runs[1]


def test_streamed_deltas_add_up_to_the_completion(scheduler):
    received = []
    future = scheduler.submit(ask(5, n=2, max_tokens=30, num_top=2), received.append)
    whole = future.result(30).completions
    for i, s in enumerate(whole):
        deltas = [delta for deltas in received for delta in deltas if delta.index == i]
        assert len(deltas) > 10
        assert [token for d in deltas for token in d.token_ids] == s.token_ids
        assert [logprob for d in deltas for logprob in d.logprobs] == s.logprobs
        assert [top for d in deltas for top in d.tops] == s.tops
        assert "".join(d.text for d in deltas) == s.text
        assert [d.finish_reason for d in deltas if d.finish_reason] == ["length"]


def test_a_cancelled_request_leaves_the_batch_and_the_queue(scheduler):
    running = scheduler.submit(ask(n=8, max_tokens=220))
    wait_until_running(scheduler)
    waiting, behind = scheduler.submit(ask(n=8)), scheduler.submit(ask())
    running.cancel()
    waiting.cancel()
    assert behind.result(5)
    assert (scheduler.status().num_running, scheduler.status().num_waiting, scheduler.runner.num_running) == (0, 0, 0)


def test_a_frozen_request_can_be_cancelled(scheduler):
    future = scheduler.submit(ask(max_tokens=220))
    wait_until_running(scheduler)
    scheduler.hold("keep", 30)
    future.cancel()
    deadline = time.monotonic() + 5
    while scheduler.status().num_running:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    scheduler.release(1)
    assert scheduler.submit(ask()).result(30).completions[0].policy_versions == [1]


# Errands


def test_a_failing_task_affects_only_its_caller(scheduler):
    def broken():
        raise ValueError("no such file")

    future = scheduler.submit(ask(max_tokens=50))
    with pytest.raises(ValueError, match="no such file"):
        scheduler.between_tokens(broken).result(10)
    assert future.result(30)
    assert scheduler.failure is None


def test_a_task_of_a_stopped_scheduler_fails(scheduler):
    begun, go_on = threading.Event(), threading.Event()
    scheduler.between_tokens(lambda: (begun.set(), go_on.wait(10)))
    begun.wait(10)
    late = scheduler.between_tokens(lambda: None)
    scheduler.stop()
    go_on.set()
    with pytest.raises(EngineError, match="shutting down"):
        late.result(10)


class SlowToBegin(ModelRunner):
    """Stops for a moment between a request's admission and its first token."""

    def __init__(self, config, folder):
        super().__init__(config, folder)
        self.has_begun, self.may_go_on = threading.Event(), threading.Event()

    def prompt_tops(self, prompt_ids, num_top):
        self.has_begun.set()
        assert self.may_go_on.wait(30)
        return super().prompt_tops(prompt_ids, num_top)


def test_a_request_keeps_the_version_of_an_adapter_unloaded_meanwhile(folder, tmp_path):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"])).save_pretrained(tmp_path)
    engine = SlowToBegin(EngineConfig(dtype="float32", threads=1), folder)
    engine.adapters.add("a", read_adapter(tmp_path))
    scheduler = Scheduler(engine, max_num_seqs=8)
    scheduler.add_adapter(Adapter("a", tmp_path, 4, policy_version=7))
    scheduler._base_version = 9  # of what came after it
    asked = scheduler.submit(ask(adapter="a", num_prompt_top=0))
    assert engine.has_begun.wait(30)
    with ThreadPoolExecutor(1) as pool:
        removing = pool.submit(scheduler.remove_adapter, "a", 30)
        deadline = time.monotonic() + 30
        while scheduler.adapters:
            assert time.monotonic() < deadline
            time.sleep(0.005)
        engine.may_go_on.set()
        assert asked.result(30).completions[0].policy_versions == [7]
        removing.result(30)
    scheduler.stop()
    scheduler.join()
