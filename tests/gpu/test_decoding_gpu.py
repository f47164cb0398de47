"""Decode steps as CUDA graphs, in the transformers engine. Never run in CI: pytest -m gpu tests/gpu."""

from __future__ import annotations

import gc
import time
import weakref

import pytest
import torch

from tests.tiny_model import write_tiny_model
from treadle.config import EngineConfig
from treadle.engines.decoding import CapturedStep, CudaGraphCapture, Decoder
from treadle.engines.interface import Request
from treadle.engines.model_runner import ModelRunner
from treadle.engines.sampling import SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
NUM_TOKENS = 120


class Counted(CudaGraphCapture):
    number = num_replays = 0

    def __call__(self, work):
        self.number += 1
        captured = super().__call__(work)

        def replay():
            self.num_replays += 1
            captured.replay()

        return CapturedStep(replay, captured.out)


def ask(prompt_ids, max_tokens=NUM_TOKENS):
    return Request(list(prompt_ids), 4, max_tokens, SamplingParams(temperature=0.9), 7, ignore_eos=True)


def generate(engine, record):
    engine._decoder = Decoder(engine._forward, engine._cache, record)
    groups = engine.admit([ask(range(3, 3 + k), NUM_TOKENS - 7 * k) for k in range(1, 9)])
    started = time.monotonic()
    while engine.num_running:
        engine.step()
    print(f"{'recorded' if record else 'plain'}: {time.monotonic() - started:.2f} s")
    assert engine._decoder._capture is record  # none was refused
    return [(s.token_ids, s.logprobs) for group in groups for s in group]


@pytest.mark.parametrize(("dtype", "limit"), [("float32", 1e-3), ("bfloat16", None)])
def test_captured_steps_sample_the_same_as_plain_ones(dtype, limit, tmp_path):
    folder = write_tiny_model(tmp_path / "model", hidden_size=256, num_layers=8)
    engine = ModelRunner(EngineConfig(dtype=dtype, device="cuda"), folder)
    graphs = Counted(engine.device)
    captured, plain = generate(engine, graphs), generate(engine, None)
    assert graphs.number >= 3
    assert graphs.num_replays > NUM_TOKENS / 2
    if limit is None:  # roundings differ, and with them what is sampled; the first token is from the prompt alone
        firsts = [(tokens[0], tokens[1], logprobs[1]) for tokens, logprobs in captured]
        expected = [(tokens[0], tokens[1], logprobs[1]) for tokens, logprobs in plain]
        alike = [abs(a[2] - b[2]) for a, b in zip(firsts, expected, strict=True) if a[:2] == b[:2]]
        assert len(alike) > len(plain) / 2
        assert max(alike) < 0.1
        return
    for (tokens, logprobs), (expected_tokens, expected) in zip(captured, plain, strict=True):
        assert tokens == expected_tokens
        assert logprobs == pytest.approx(expected, abs=limit)


def test_a_model_that_waits_for_the_gpu_is_decoded_step_by_step(tmp_path, caplog):
    folder = write_tiny_model(tmp_path / "model", hidden_size=256)
    engine = ModelRunner(EngineConfig(dtype="float32", device="cuda"), folder)
    plain = generate(engine, None)
    stream = torch.cuda.current_stream()

    def wait_for_the_gpu(*_):
        torch.ones(1, device="cuda").item()

    hook = engine.model.base_model.layers[1].register_forward_hook(wait_for_the_gpu)
    engine._decoder = Decoder(engine._forward, engine._cache, CudaGraphCapture(engine.device))
    groups = engine.admit([ask(range(3, 3 + k), NUM_TOKENS - 7 * k) for k in range(1, 9)])
    while engine.num_running:
        engine.step()
    hook.remove()
    assert [s.token_ids for group in groups for s in group] == [tokens for tokens, _ in plain]
    assert [r.getMessage() for r in caplog.records] == ["cuda_graph_not_captured"]
    assert torch.cuda.current_stream() == stream
    torch.cuda.empty_cache()
    captured = generate(engine, CudaGraphCapture(engine.device))  # and another engine can record
    assert [tokens for tokens, _ in captured] == [tokens for tokens, _ in plain]


@pytest.mark.parametrize("renews", [True, False])  # an engine does; a recording must see it all the same
def test_a_captured_step_uses_changed_weights(renews, tmp_path):
    folder = write_tiny_model(tmp_path / "model", hidden_size=256)
    engine = ModelRunner(EngineConfig(dtype="float32", device="cuda"), folder)
    generated = []
    for record in (CudaGraphCapture(engine.device), None):
        engine._decoder = Decoder(engine._forward, engine._cache, record)
        (group,) = engine.admit([ask([5, 6, 7], 40)])
        for number in range(40):
            if number == 20:
                with torch.no_grad():
                    engine.model.base_model.norm.weight.mul_(0.5)
                if renews:
                    engine.recompute(1)
            engine.step()
        with torch.no_grad():
            engine.model.base_model.norm.weight.mul_(2.0)
        generated.append([s.token_ids for s in group])
    assert generated[0] == generated[1]


def test_recordings_that_are_dropped_give_their_memory_back(tmp_path):
    folder = write_tiny_model(tmp_path / "model", hidden_size=256, num_layers=8)
    engine = ModelRunner(EngineConfig(dtype="bfloat16", device="cuda"), folder)
    graphs = Counted(engine.device)
    engine._decoder = Decoder(engine._forward, engine._cache, graphs)
    reserved = []
    for number in range(40):
        engine.admit([ask(range(3, 8), 20 + number % 7) for _ in range(1 + number % 5)])
        while engine.num_running:
            engine.step()
        reserved.append(torch.cuda.memory_reserved())
    assert graphs.number >= 30
    assert max(reserved[20:]) <= max(reserved[:20])


def test_an_engine_that_is_left_is_freed_with_its_recording(tmp_path):
    folder = write_tiny_model(tmp_path / "model", hidden_size=256)
    engine = ModelRunner(EngineConfig(dtype="float32", device="cuda"), folder)
    generate(engine, CudaGraphCapture(engine.device))
    left = weakref.ref(engine.model.base_model.norm.weight)
    gc.disable()
    try:
        del engine
        assert left() is None
    finally:
        gc.enable()
