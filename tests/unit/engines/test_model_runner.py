"""Batched generation against plain transformers, on a real small model."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.tiny_model import write_tiny_model
from treadle.config import EngineConfig
from treadle.engines import model_runner
from treadle.engines.interface import Request
from treadle.engines.model_runner import ModelRunner
from treadle.engines.sampling import SamplingParams


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    folder = write_tiny_model(tmp_path_factory.mktemp("tiny"))
    return ModelRunner(EngineConfig(dtype="float32", threads=1), folder)


def ask(prompt_ids, *, n=1, max_tokens=12, temperature=1.0, seed=0, stop=(), stop_ids=(), **more):
    sampling = SamplingParams(temperature=temperature)
    ends = frozenset(stop_ids)
    return Request(list(prompt_ids), n, max_tokens, sampling, seed, tuple(stop), ends, ignore_eos=True, **more)


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


def test_a_seed_gives_the_same_tokens_alone_and_in_a_batch(engine):
    alone = generate(engine, ask([5, 6, 7], n=3, seed=42))[0]
    in_company = generate(engine, ask([9], n=5, seed=1), ask([5, 6, 7], n=3, seed=42), ask([4] * 20, seed=3))[1]
    assert [s.token_ids for s in alone] == [s.token_ids for s in in_company]
    assert len({tuple(s.token_ids) for s in alone}) == 3


@pytest.fixture
def apart(engine):
    """The same runner with a row for each completion, as on a GPU."""
    engine._shares_rows = False
    yield engine
    engine._shares_rows = True


def ask_alike():
    """Completions with a common beginning that differ later."""
    return [ask([5, 6, 7], n=6, seed=42, temperature=0.03, max_tokens=25), ask([9, 8], n=4, seed=1, temperature=0.03)]


def test_sharing_rows_changes_no_token(engine, apart):
    expected = [s for group in generate(apart, *ask_alike()) for s in group]
    apart._shares_rows = True
    groups = engine.admit(ask_alike())
    num_rows = []
    while engine.num_running:
        num_rows.append(len(engine._rows))
        engine.step()
    together = [s for group in groups for s in group]
    assert [s.token_ids for s in together] == [s.token_ids for s in expected]
    for one, other in zip(together, expected, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=2e-5)
    assert num_rows[0] == 2
    assert 2 < max(num_rows) < 10
    assert len({tuple(s.token_ids) for s in together[:6]}) > 1


def test_rows_stay_shared_when_the_weights_change(engine):
    expected = [s.token_ids for group in generate(engine, *ask_alike()) for s in group]
    groups = engine.admit(ask_alike())
    for _ in range(4):
        engine.step()
    num_rows = len(engine._rows)
    engine.recompute(1)  # to the same weights
    assert len(engine._rows) == num_rows < 10
    while engine.num_running:
        engine.step()
    assert [s.token_ids for group in groups for s in group] == expected
    assert all(s.policy_versions == [0, 1] for s in groups[0])


def test_requests_may_join_while_others_run(engine):
    expected = [s.token_ids for s in generate(engine, ask([5, 6, 7], n=2, seed=42, max_tokens=30))[0]]
    first = engine.admit([ask([11, 12], n=3, seed=9, max_tokens=20)])[0]
    for _ in range(5):
        engine.step()
    late = engine.admit([ask([5, 6, 7], n=2, seed=42, max_tokens=30)])[0]
    while any(s.finish_reason is None for s in first + late):
        engine.step()
    assert [s.token_ids for s in late] == expected


def test_finish_reasons_of_stop_token_stop_string_and_length(engine):
    free = generate(engine, ask([5, 6], temperature=0.0, max_tokens=10))[0][0]
    assert free.finish_reason == "length"
    assert len(free.token_ids) == 10
    third = free.token_ids[2]
    stopped = generate(engine, ask([5, 6], temperature=0.0, max_tokens=10, stop_ids=[third]))[0][0]
    assert stopped.finish_reason == "stop"
    assert stopped.token_ids == free.token_ids[: free.token_ids.index(third) + 1]
    text = free.text
    word = text[3:5]
    cut = generate(engine, ask([5, 6], temperature=0.0, max_tokens=10, stop=[word]))[0][0]
    assert cut.finish_reason == "stop"
    assert cut.text == text[: text.index(word)]


def plain_logits(engine, token_ids):
    plain = AutoModelForCausalLM.from_pretrained(engine.folder, dtype=torch.float32)
    with torch.no_grad():
        return plain(torch.tensor([token_ids])).logits[0]


def test_logprobs_are_those_of_the_distribution_that_was_sampled_from(engine):
    s = generate(engine, ask([5, 6, 7], temperature=0.4, num_top=3))[0][0]
    table = torch.log_softmax(plain_logits(engine, [5, 6, 7, *s.token_ids]) / 0.4, -1)[2:-1]
    expected = table.gather(1, torch.tensor(s.token_ids)[:, None]).squeeze(1)
    torch.testing.assert_close(torch.tensor(s.logprobs), expected, atol=2e-5, rtol=0)
    for row, top in zip(table, s.tops, strict=True):
        likeliest = row.topk(3)
        assert list(top) == likeliest.indices.tolist()
        assert list(top.values()) == pytest.approx(likeliest.values.tolist(), abs=2e-5)


def test_each_request_gets_the_number_of_top_tokens_it_asked_for(engine):
    few, none, many = generate(engine, ask([5, 6], num_top=1), ask([5, 7]), ask([5, 8], num_top=4))
    assert {len(top) for top in few[0].tops} == {1}
    assert none[0].tops == []
    assert {len(top) for top in many[0].tops} == {4}


def test_a_prompts_logprobs_while_others_run(engine):
    expected = generate(engine, ask([5, 6, 7], n=2, seed=4))[0]
    running = engine.admit([ask([5, 6, 7], n=2, seed=4)])[0]
    engine.step()
    prompt = [9, 8, 7, 20, 21]
    tops = engine.prompt_tops(prompt, 2)
    while engine.num_running:
        engine.step()
    assert [s.token_ids for s in running] == [s.token_ids for s in expected]
    table = torch.log_softmax(plain_logits(engine, prompt), -1)
    assert tops[0] == {}
    for t, top in enumerate(tops[1:], 1):
        assert next(iter(top)) == prompt[t]
        for token, logprob in top.items():
            assert logprob == pytest.approx(table[t - 1, token].item(), abs=2e-5)


def test_prompts_too_many_for_one_forward_are_prefilled_in_parts(engine):
    asked = [ask([3 + k % 50, *range(5, 20 + k % 3)], seed=k, max_tokens=2) for k in range(1000)]
    assert sum(len(request.prompt_ids) for request in asked) > model_runner.PREFILL_TOKENS
    in_parts = generate(engine, *asked)
    for place in (0, 500, 999):
        alone = generate(engine, asked[place])[0][0]
        assert in_parts[place][0].token_ids == alone.token_ids
        assert in_parts[place][0].logprobs == pytest.approx(alone.logprobs, abs=2e-5)


def test_runners_in_one_process_are_independent(engine, tmp_path):
    expected = generate(engine, ask([5, 6, 7], n=2))[0]
    mine = engine.admit([ask([5, 6, 7], n=2)])[0]
    other = ModelRunner(EngineConfig(dtype="float32", threads=1), write_tiny_model(tmp_path, seed=1))
    theirs = other.admit([ask([5, 6, 7], n=3, max_tokens=20)])[0]
    while engine.num_running or other.num_running:
        engine.step()
        other.step()
    assert [s.logprobs for s in mine] == [s.logprobs for s in expected]
    assert len(theirs[0].token_ids) == 20
