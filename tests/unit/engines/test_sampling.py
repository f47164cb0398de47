from __future__ import annotations

import numpy as np
import pytest
import torch

from treadle.engines.sampling import SamplingParams, sample, uniforms


def test_a_seeds_numbers_do_not_depend_on_how_many_are_drawn():
    np.testing.assert_array_equal(uniforms(7, 3, 4), uniforms(7, 3, 50)[:4])
    assert not np.array_equal(uniforms(7, 3, 4), uniforms(7, 4, 4))
    assert not np.array_equal(uniforms(7, 3, 4), uniforms(8, 3, 4))


@pytest.mark.parametrize("num_tokens", [5, 256, 1000])
def test_sampled_frequencies_follow_the_distribution(num_tokens):
    torch.manual_seed(0)
    logits = torch.randn(num_tokens) * 2
    count = 200_000
    rows = 2000
    probs = torch.softmax(logits / 0.7, -1)
    seen = torch.zeros(num_tokens)
    draws = torch.tensor(np.random.default_rng(1).random(count))
    for start in range(0, count, rows):
        tokens, logprobs = sample(
            logits.expand(rows, -1), [SamplingParams(temperature=0.7)] * rows, draws[start : start + rows]
        )
        seen += torch.bincount(tokens, minlength=num_tokens)
        torch.testing.assert_close(logprobs, probs.log()[tokens], atol=1e-5, rtol=0)
    error = (seen / count - probs).abs()
    assert (error < 5 * (probs * (1 - probs) / count).sqrt() + 1e-5).all()


def test_temperature_zero_is_greedy_and_reports_raw_logprobs():
    logits = torch.tensor([[0.0, 3.0, 1.0]])
    tokens, logprobs = sample(logits, [SamplingParams(temperature=0.0)], torch.tensor([0.01]))
    assert tokens.tolist() == [1]
    torch.testing.assert_close(logprobs, torch.log_softmax(logits, -1)[:, 1])


@pytest.mark.parametrize(
    ("params", "allowed"),
    [
        (SamplingParams(top_k=2), {1, 2}),
        (SamplingParams(top_p=0.5), {1}),
        (SamplingParams(top_p=0.9), {1, 2}),
        (SamplingParams(min_p=0.12), {1, 2}),
    ],
)
def test_truncation_keeps_only_what_it_should_and_renormalises(params, allowed):
    logits = torch.tensor([0.0, 3.0, 1.0, -2.0]).expand(1000, -1)
    draws = torch.tensor(np.random.default_rng(2).random(1000))
    tokens, logprobs = sample(logits, [params] * 1000, draws)
    assert set(tokens.tolist()) == allowed
    kept = torch.full((4,), -torch.inf)
    kept[list(allowed)] = logits[0, list(allowed)]
    torch.testing.assert_close(logprobs, torch.log_softmax(kept, -1)[tokens], atol=1e-5, rtol=0)


@pytest.mark.parametrize("draw", [0.0, 1 - 1e-16, 0.9999999])
def test_the_ends_of_the_unit_interval_never_choose_an_impossible_token(draw):
    logits = torch.full((1, 300), -torch.inf)
    logits[0, 7], logits[0, 280] = 0.0, -30.0
    tokens, logprobs = sample(logits, [SamplingParams()], torch.tensor([draw], dtype=torch.float64))
    assert tokens.item() in (7, 280)
    assert torch.isfinite(logprobs).all()
