"""Batched generation against plain transformers, on a real small model."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.tiny_model import write_tiny_model
from treadle.config import EngineConfig
from treadle.engines.sampling import SamplingParams
from treadle.engines.transformers_engine import Request, TransformersEngine


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    folder = write_tiny_model(tmp_path_factory.mktemp("tiny"))
    return TransformersEngine(EngineConfig(dtype="float32", threads=1), folder)


def ask(prompt_ids, *, n=1, max_tokens=12, temperature=1.0, seed=0, stop=(), stop_ids=()):
    return Request(
        list(prompt_ids), n, max_tokens, SamplingParams(temperature=temperature), seed, list(stop), set(stop_ids)
    )


def generate(engine, *requests):
    groups = engine.admit(list(requests))
    while any(s.finish_reason is None for g in groups for s in g):
        engine.step()
    return groups


@pytest.mark.parametrize(
    "prompts",
    [
        pytest.param([[5, 9, 20, 33], [40, 41], [7] * 9], id="nothing in common"),
        pytest.param([[5, 6, 7, 8], [5, 6, 9], [5, 6, 7, 9, 10]], id="a common beginning"),
        pytest.param([[5, 6, 7], [5, 6, 7], [5, 6, 7, 8]], id="one within the other"),
    ],
)
def test_greedy_text_equals_transformers_generate(engine, prompts):
    groups = generate(engine, *(ask(p, temperature=0.0, max_tokens=15) for p in prompts))
    plain = AutoModelForCausalLM.from_pretrained(engine.folder, dtype=torch.float32)
    for prompt, (sequence,) in zip(prompts, groups, strict=True):
        expected = plain.generate(torch.tensor([prompt]), max_new_tokens=15, do_sample=False, eos_token_id=None)
        assert sequence.token_ids == expected[0, len(prompt) :].tolist()


def test_logprobs_equal_a_full_forward_in_a_ragged_batch(engine):
    groups = generate(
        engine, *(ask(range(3, 3 + k), n=4, seed=k, max_tokens=5 * k, temperature=0.8) for k in (1, 2, 6))
    )
    plain = AutoModelForCausalLM.from_pretrained(engine.folder, dtype=torch.float32)
    for group in groups:
        for s in group:
            ids = s.request.prompt_ids + s.token_ids
            with torch.no_grad():
                table = torch.log_softmax(plain(torch.tensor([ids])).logits[0] / 0.8, -1)
            start = len(s.request.prompt_ids)
            expected = [table[start + t - 1, token] for t, token in enumerate(s.token_ids)]
            torch.testing.assert_close(torch.tensor(s.logprobs), torch.stack(expected), atol=2e-5, rtol=0)


def test_a_seed_gives_the_same_tokens_alone_and_in_company(engine):
    alone = generate(engine, ask([5, 6, 7], n=3, seed=42))[0]
    in_company = generate(engine, ask([9], n=5, seed=1), ask([5, 6, 7], n=3, seed=42), ask([4] * 20, seed=3))[1]
    assert [s.token_ids for s in alone] == [s.token_ids for s in in_company]
    assert len({tuple(s.token_ids) for s in alone}) == 3


def test_requests_may_join_while_others_run(engine):
    expected = [s.token_ids for s in generate(engine, ask([5, 6, 7], n=2, seed=42, max_tokens=30))[0]]
    first = engine.admit([ask([11, 12], n=3, seed=9, max_tokens=20)])[0]
    for _ in range(5):
        engine.step()
    late = engine.admit([ask([5, 6, 7], n=2, seed=42, max_tokens=30)])[0]
    while any(s.finish_reason is None for s in first + late):
        engine.step()
    assert [s.token_ids for s in late] == expected


def test_stop_token_stop_string_and_length_are_told_apart(engine):
    free = generate(engine, ask([5, 6], temperature=0.0, max_tokens=10))[0][0]
    assert free.finish_reason == "length"
    assert len(free.token_ids) == 10
    third = free.token_ids[2]
    stopped = generate(engine, ask([5, 6], temperature=0.0, max_tokens=10, stop_ids=[third]))[0][0]
    assert stopped.finish_reason == "stop"
    assert stopped.token_ids == free.token_ids[: free.token_ids.index(third) + 1]
    text = engine.decode(free.token_ids)
    word = text[3:5]
    cut = generate(engine, ask([5, 6], temperature=0.0, max_tokens=10, stop=[word]))[0][0]
    assert cut.finish_reason == "stop"
    assert cut.text == text[: text.index(word)]
