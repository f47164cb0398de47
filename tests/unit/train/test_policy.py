"""The trainer's numbers against plain transformers forwards of the same model."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.sample_groups import make_groups
from tests.tiny_model import write_tiny_model
from treadle.config import TrainConfig
from treadle.config.train import LOGPROB_CHUNK
from treadle.train.loop import accumulate_gradients
from treadle.train.optimizers import build_optimizer
from treadle.train.pack import pack
from treadle.train.policy import load_policy


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch):
    """Several per vocabulary."""
    monkeypatch.setitem(LOGPROB_CHUNK, "cpu", 17)


FP32 = TrainConfig(dtype="float32", device="cpu", micro_tokens=10_000)


def plain_table(plain, tokens):
    return torch.log_softmax(plain(torch.tensor([tokens])).logits[0] / 0.7, -1)


@pytest.mark.parametrize("share", ["on", "off"])
@pytest.mark.parametrize("kind", ["blocks", "sdpa"])
def test_packed_logprobs_equal_one_forward_per_rollout(folder, share, kind):
    groups = make_groups()
    config = FP32.model_copy(update={"share_prompts": share, "attention": kind})
    policy = load_policy(folder, config)
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    (micro,) = pack(groups, config).micros
    assert (len(micro.token_ids_T) < sum(len(t) - 1 for g in groups for t in g.tokens)) == (share == "on")
    logprobs, entropy = policy.score(micro)
    expected, expected_entropy = [], []
    for g in groups:
        for tokens, mask in zip(g.tokens, g.masks, strict=True):
            with torch.no_grad():
                table = plain_table(plain, tokens)
            for t in range(1, len(tokens)):
                if mask[t] != -100:
                    expected.append(table[t - 1, tokens[t]])
                    expected_entropy.append(-(table[t - 1].exp() * table[t - 1]).sum())
    torch.testing.assert_close(logprobs.detach(), torch.stack(expected), atol=2e-5, rtol=0)
    torch.testing.assert_close(entropy, torch.stack(expected_entropy), atol=2e-5, rtol=0)


def gradient_of(folder, groups, **changes):
    config = FP32.model_copy(update=changes)
    policy = load_policy(folder, config)
    optimizer = build_optimizer(policy, config)
    batch = pack(groups, config)
    accumulate_gradients(policy, batch, config)
    return len(batch.micros), optimizer.gradients


OBJECTIVES = [
    {},
    {"aggregation": "sequence_mean"},
    {"aggregation": "sequence_constant"},
    {"ratio": "sequence_mean", "aggregation": "sequence_mean"},
    {"kl_coef": 0.1, "surrogate": "cispo"},
]


@pytest.mark.parametrize("objective", OBJECTIVES, ids=str)
@pytest.mark.parametrize(
    "split", [{"micro_tokens": 60}, {"micro_tokens": 25}, {"micro_tokens": 1}, {"share_prompts": "off"}], ids=str
)
def test_the_gradient_does_not_depend_on_how_the_step_is_split(folder, objective, split):
    groups = make_groups()
    whole, expected = gradient_of(folder, groups, **objective)
    parts, got = gradient_of(folder, groups, **objective, **split)
    assert whole == 1
    assert parts > 1 or "share_prompts" in split
    largest = max(float(g.abs().max()) for g in expected.values())
    assert largest > 0
    for name, gradient in expected.items():
        torch.testing.assert_close(got[name], gradient, atol=2e-6 * largest + 1e-7, rtol=1e-3)


@pytest.mark.parametrize("kind", ["blocks", "sdpa"])
@pytest.mark.parametrize("objective", OBJECTIVES, ids=str)
def test_the_gradient_does_not_depend_on_shared_stems(folder, objective, kind):
    groups = make_groups()
    for number, g in enumerate(groups):  # completions that begin alike, up to identical ones
        start = sum(mask == -100 for mask in g.masks[0])
        stem = g.tokens[0][start:]
        for i in range(1, g.size):
            g.tokens[i] = g.tokens[i][:start] + stem[: (i + number) % (len(stem) + 1)] + g.tokens[i][start:]
            g.masks[i] = [-100] * start + g.tokens[i][start:]
            g.inference_logprobs[i] = [1.0] * start + [-1.0] * (len(g.tokens[i]) - start)
    apart = pack(groups, FP32.model_copy(update={"share_prompts": "off"}))
    assert pack(groups, FP32).num_forwarded_tokens < 0.6 * apart.num_forwarded_tokens
    _, expected = gradient_of(folder, groups, **objective, share_prompts="off")
    _, got = gradient_of(folder, groups, **objective, share_prompts="on", attention=kind)
    largest = max(float(g.abs().max()) for g in expected.values())
    for name, gradient in expected.items():
        torch.testing.assert_close(got[name], gradient, atol=2e-6 * largest + 1e-7, rtol=1e-3)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_ranks_that_share_out_the_micros_add_up_to_the_same_gradient(folder, num_ranks):
    """Each rank packs the whole step and takes its own micros: the weights of tokens know the whole step."""
    groups = make_groups()
    _, expected = gradient_of(folder, groups)
    config = FP32.model_copy(update={"micro_tokens": 30})
    total = {name: torch.zeros_like(g) for name, g in expected.items()}
    for rank in range(num_ranks):
        policy = load_policy(folder, config)
        optimizer = build_optimizer(policy, config)
        batch = pack(groups, config)
        accumulate_gradients(policy, replace(batch, micros=batch.micros[rank::num_ranks]), config)
        for name, gradient in optimizer.gradients.items():
            total[name] += gradient
    for name, gradient in expected.items():
        torch.testing.assert_close(total[name], gradient, atol=1e-6, rtol=1e-3)


def test_tied_embeddings_are_one_parameter_with_one_summed_gradient(folder):
    policy = load_policy(folder, FP32)
    optimizer = build_optimizer(policy, FP32)
    assert "lm_head.weight" not in policy.live
    (micro,) = pack(make_groups(1), FP32).micros
    policy.score(micro)[0].sum().backward()
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    total = 0.0
    for g in make_groups(1):
        for tokens, mask in zip(g.tokens, g.masks, strict=True):
            table = plain_table(plain, tokens)
            total = total + sum(table[t - 1, tokens[t]] for t in range(1, len(tokens)) if mask[t] != -100)
    total.backward()
    ours = optimizer.gradients["model.embed_tokens.weight"]
    torch.testing.assert_close(ours, plain.model.embed_tokens.weight.grad, atol=2e-4, rtol=1e-3)


def test_checkpointed_activations_give_the_same_gradient(folder):
    groups = make_groups()
    _, expected = gradient_of(folder, groups)
    _, got = gradient_of(folder, groups, gradient_checkpointing=True)
    for name, gradient in expected.items():
        assert torch.equal(got[name], gradient)


def test_only_the_chosen_layers_are_trained(folder):
    _, got = gradient_of(folder, make_groups(), train_layer_indices=(0, 2))
    assert got
    assert all(".layers.0." in name or ".layers.2." in name for name in got)
    _, expected = gradient_of(folder, make_groups())
    for name, gradient in got.items():
        torch.testing.assert_close(gradient, expected[name], atol=1e-6, rtol=1e-4)


def test_adapters_are_trained_and_what_is_published_is_the_merged_weight(folder):
    config = FP32.model_copy(update={"lora": True, "lora_r": 4, "lr": 1e-2, "warmup_steps": 0})
    served = {n: p.detach().clone() for n, p in AutoModelForCausalLM.from_pretrained(folder).named_parameters()}
    before = {n: p.clone() for n, p in served.items()}
    policy = load_policy(folder, config, shared=served)
    optimizer = build_optimizer(policy, config)
    assert all("lora_" in name for name in policy.live)
    batch = pack(make_groups(), config)
    for step in (1, 2):
        accumulate_gradients(policy, batch, config)
        optimizer.step(step)
        policy.write_live_weights()
    changed = {name for name in served if not torch.equal(served[name], before[name])}
    assert changed == {n for n in served if "q_proj" in n or "v_proj" in n}
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.load_state_dict(served, strict=False)
    plain = load_policy(folder, FP32)
    for name, weight in served.items():
        plain.live[name].data.copy_(weight)
    (micro,) = batch.micros
    with torch.no_grad():
        torch.testing.assert_close(plain.score(micro)[0], policy.score(micro)[0], atol=1e-5, rtol=1e-5)


def test_the_reference_stays_where_training_began(folder):
    for changes in ({}, {"lora": True}):
        config = FP32.model_copy(update={"lr": 1e-2, "warmup_steps": 0, **changes})
        policy = load_policy(folder, config)
        optimizer = build_optimizer(policy, config)
        reference = policy.reference(folder)
        batch = pack(make_groups(), config)
        (micro,) = batch.micros
        before = policy.score(micro)[0].detach()
        for step in (1, 2, 3):
            accumulate_gradients(policy, batch, config)
            optimizer.step(step)
            policy.write_live_weights()
        assert torch.equal(reference(micro), before)
        assert (policy.score(micro)[0] - before).abs().max() > 0.01
