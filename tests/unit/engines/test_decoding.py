"""Captured decode steps must equal plain ones while the batch does not change.

Here a step is "captured" by keeping a function that runs again on the same memory, as a CUDA graph does. Real graphs
are tested on a GPU (tests/gpu/test_decoding_gpu.py).
"""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from tests.tiny_model import write_tiny_model
from treadle.config import EngineConfig
from treadle.engines import decoding
from treadle.engines.decoding import CapturedStep, Decoder
from treadle.engines.interface import Request
from treadle.engines.model_runner import ModelRunner
from treadle.engines.sampling import SamplingParams


class Records:
    """Counts captures and their replays; a replay requires that keys and values have not moved."""

    def __init__(self, spoil=None):
        self.replays = []
        self.lengths = []  # positions that each looks at
        self.cache = None
        self._spoil = spoil

    def __call__(self, work):
        place, places = len(self.replays), self._places()
        self.replays.append(0)
        out = work().clone()
        self.lengths.append(self.cache._length)

        def replay():
            self.replays[place] += 1
            assert self._places() == places
            if self._spoil is None:
                out.copy_(work())
                return
            right = self._spoil.clone()
            self._spoil.add_(0.3)  # inside of the layers, so that wrong keys and values are written
            out.copy_(work())
            self._spoil.copy_(right)

        return CapturedStep(replay, out)

    def _places(self):
        return [t.data_ptr() for t in (*self.cache._keys, *self.cache._values)]


@pytest.fixture(autouse=True)
def grow_as_on_a_gpu(monkeypatch):
    monkeypatch.setitem(decoding.GROWTH, "cpu", decoding.GROWTH["cuda"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


def engine_that(record, folder):
    engine = ModelRunner(EngineConfig(dtype="float32", threads=1), folder)
    if isinstance(record, Records):
        record.cache = engine._cache
    engine._decoder = Decoder(engine._forward, engine._cache, record)
    return engine


def generate(engine, *, late=()):
    """Prompts of different lengths that end at different times; `late` ones join in the middle."""
    lengths = ((1, 20), (5, 90), (9, 40), (3, 90))
    groups = engine.admit([ask(range(3, 3 + k), max_tokens) for k, max_tokens in lengths])
    for number in range(200):
        if number == 30:
            groups += engine.admit([ask(ids, 25) for ids in late]) if late else []
        engine.step()
        if not engine.num_running:
            break
    return [(s.token_ids, s.logprobs) for group in groups for s in group]


def ask(prompt_ids, max_tokens):
    return Request(list(prompt_ids), 2, max_tokens, SamplingParams(temperature=0.9), 7, ignore_eos=True)


@pytest.mark.parametrize("late", [(), ([4, 5], [9, 9, 9])])
def test_captured_steps_sample_the_same_as_plain_ones(folder, late):
    records = Records()
    captured = generate(engine_that(records, folder), late=late)
    plain = generate(engine_that(None, folder), late=late)
    assert sum(records.replays) > 60
    assert len(records.replays) >= 3  # rows that finish or come, and a cache that grows, need another one
    for (tokens, logprobs), (expected_tokens, expected) in zip(captured, plain, strict=True):
        assert tokens == expected_tokens
        assert logprobs == pytest.approx(expected, abs=1e-4)


def test_short_batches_are_not_captured(folder):
    records = Records()
    engine = engine_that(records, folder)
    engine.admit([ask([5, 6, 7], decoding.CAPTURE_AFTER)])
    while engine.num_running:
        engine.step()
    assert records.replays == []


@pytest.mark.parametrize("renews", [True, False])  # an engine does; a recording must see it all the same
def test_a_captured_step_uses_changed_weights(folder, renews):
    engines = [engine_that(Records(), folder), engine_that(None, folder)]
    sampled = []
    for engine in engines:
        groups = engine.admit([ask([5, 6, 7], 40)])
        for number in range(40):
            if number == 20:
                with torch.no_grad():
                    engine.model.base_model.norm.weight.mul_(0.5)
                if renews:
                    engine.recompute(1)
            engine.step()
        sampled.append([s.token_ids for group in groups for s in group])
        assert [s.policy_versions for group in groups for s in group] == [[0, 1] if renews else [0]] * 2
    assert sampled[0] == sampled[1]


def test_captures_with_few_replays_become_rare(folder):
    records = Records()
    engine = engine_that(records, folder)
    for _ in range(12):
        engine.admit([ask([5, 6, 7], decoding.CAPTURE_AFTER + 3)])
        while engine.num_running:
            engine.step()
    assert len(records.replays) == 1
    engine.admit([ask([5, 6, 7], 40)])
    while engine.num_running:
        engine.step()
    assert records.replays[1] > decoding.MIN_REPLAYS
    engine.admit([ask([5, 6, 7], decoding.CAPTURE_AFTER + 3)])
    while engine.num_running:
        engine.step()
    assert len(records.replays) == 3, "it was worth it: the next one comes as soon as the first"


def test_a_captured_step_attends_no_further_than_the_longest_row(folder):
    records = Records()
    engine = engine_that(records, folder)
    groups = engine.admit([ask(range(3, 3 + 70), 5), ask([4] * 150, 3), ask([5, 6], 80)])
    while engine.num_running:
        engine.step()
    assert records.lengths[-2:] == [64, 128]
    plain = engine_that(None, folder)
    expected = plain.admit([ask(range(3, 3 + 70), 5), ask([4] * 150, 3), ask([5, 6], 80)])
    while plain.num_running:
        plain.step()
    assert [s.token_ids for group in groups for s in group] == [s.token_ids for group in expected for s in group]


@pytest.mark.parametrize("is_direct", [True, False])
def test_a_capture_out_of_memory_is_retried(folder, caplog, is_direct):
    records, attempts = Records(), []

    def lacking_memory(work):
        attempts.append(1)
        if len(attempts) > 2:
            return records(work)
        try:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        finally:
            if not is_direct:
                raise RuntimeError("capture was invalidated")

    engine = engine_that(lacking_memory, folder)
    records.cache = engine._cache
    assert [t for t, _ in generate(engine)] == [t for t, _ in generate(engine_that(None, folder))]
    assert sum(records.replays) > 20
    logged = [r.treadle_fields["reason"] for r in caplog.records if r.getMessage() == "cuda_graph_not_captured"]
    assert logged == ["out of memory"] * 2


def cannot(work):
    raise RuntimeError("operation not permitted when stream is capturing\nand more")


def logged_reason(caplog):
    (logged,) = [r for r in caplog.records if r.getMessage() == "cuda_graph_not_captured"]
    return logged.treadle_fields["reason"]


def test_what_cannot_be_captured_is_decoded_step_by_step(folder, caplog):
    assert generate(engine_that(cannot, folder)) == generate(engine_that(None, folder))
    assert logged_reason(caplog) == "operation not permitted when stream is capturing"


def test_a_capture_with_wrong_results_is_dropped_without_a_trace(folder, caplog):
    engine = engine_that(None, folder)
    records = Records(spoil=engine.model.base_model.layers[0].input_layernorm.weight.detach())
    records.cache = engine._cache
    engine._decoder = Decoder(engine._forward, engine._cache, records)
    assert generate(engine) == generate(engine_that(None, folder))
    assert "its result differs" in logged_reason(caplog)
    assert records.replays == [1]


def test_a_dropped_runner_is_freed_at_once(folder):
    engine = engine_that(None, folder)
    weight, left = weakref.ref(engine.model.base_model.norm.weight), weakref.ref(engine)
    generate(engine)
    gc.disable()
    try:
        del engine
        assert left() is None
        assert weight() is None
    finally:
        gc.enable()
