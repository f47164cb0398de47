"""Adapters on a base model in 4 bits: the trainer's numbers are those of the engine, and the base stays as it is."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tests.tiny_model import write_tiny_model
from treadle.config import TrainConfig
from treadle.engines.model_runner import load_model
from treadle.errors import ConfigError
from treadle.loading import loading_options
from treadle.sync.protocol import check_same_quantization
from treadle.train.optimizers import build_optimizer
from treadle.train.policy import load_policy

IDS = [5, 6, 7, 8, 9, 10]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("model"), hidden_size=256)


def new_policy(folder, quantization):
    config = TrainConfig(
        device="cpu", dtype="float32", weight_bridge_mode="lora_only", quantization=quantization, lr=1e-2,
        warmup_steps=0,
    )  # fmt: skip
    return load_policy(folder, config), config


def test_four_bits_are_a_fraction_of_the_memory_and_close_to_the_model(folder):
    (whole, _), (packed, _) = (new_policy(folder, quantization) for quantization in ("none", "nf4"))

    def layer_bytes(policy):
        matrices = [p for name, p in policy.weights.items() if name.endswith("proj.weight")]
        return sum(p.numel() * p.element_size() for p in matrices)

    assert layer_bytes(packed) * 8 == layer_bytes(whole)
    assert packed.flops_per_token == whole.flops_per_token
    difference = (packed.score_tokens(IDS).logprobs_T - whole.score_tokens(IDS).logprobs_T).abs()
    assert 1e-6 < difference.max() < 0.5


def test_adapters_learn_on_a_packed_base_that_stays_as_it_is(folder):
    policy, config = new_policy(folder, "nf4")
    optimizer = build_optimizer(policy, config)
    before = {name: weight.detach().clone() for name, weight in policy.weights.items()}
    scored = policy.score_tokens(IDS).logprobs_T
    for step in (1, 2):
        for gradient in optimizer.gradients.values():
            gradient.copy_(torch.randn(gradient.shape, generator=torch.Generator().manual_seed(step)))
        optimizer.step(step)
        policy.write_live_weights()
    assert not torch.allclose(policy.score_tokens(IDS).logprobs_T, scored)
    assert all(torch.equal(weight, before[name]) for name, weight in policy.weights.items())


def test_the_transformers_engine_loads_the_same_numbers(folder):
    policy, _ = new_policy(folder, "nf4")
    model = load_model(folder, torch.float32, loading_options("nf4", torch.float32, torch.device("cpu")))
    with torch.no_grad():
        logits_TV = model(torch.tensor([IDS])).logits[0, :-1].float()
    own_T = logits_TV.log_softmax(-1).gather(-1, torch.tensor(IDS[1:])[:, None])[:, 0]
    torch.testing.assert_close(policy.score_tokens(IDS).logprobs_T, own_T, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("served", "trained"), [("none", "nf4"), ("nf4", "none")])
def test_an_engine_with_other_bits_is_refused_by_name(served, trained):
    config = TrainConfig(weight_bridge_mode="lora_only", quantization=trained)
    with pytest.raises(ConfigError, match=f"quantization {served}, and the trainer's {trained}") as refused:
        check_same_quantization(config, SimpleNamespace(quantization=served))
    assert f"--quantization {trained}" in refused.value.fix
