"""The trainer's numbers against plain transformers forwards of the same model."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.tiny_model import write_tiny_model
from treadle.config import TrainConfig
from treadle.train.attention import PackedAttention, lay_out
from treadle.train.logprobs import chosen_logprobs
from treadle.train.loop import accumulate_gradients
from treadle.train.optim import Optimizer, clip_gradients, learning_rate
from treadle.train.pack import Segment, pack
from treadle.train.policy import load_policy
from treadle.wire.groups import ScoredGroup


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


def make_groups(num_groups=5, seed=0):
    random = torch.Generator().manual_seed(seed)

    def draw(low, high):
        length = int(torch.randint(low, high, (1,), generator=random))
        return torch.randint(3, 60, (length,), generator=random).tolist()

    groups = []
    for _ in range(num_groups):
        prompt = [7, 8, 9, *draw(3, 9)]  # all begin alike
        completions = [draw(1, 8) for _ in range(4)]
        groups.append(
            ScoredGroup(
                tokens=[prompt + c for c in completions],
                masks=[[-100] * len(prompt) + c for c in completions],
                scores=[0.0, 1.0, 0.5, 2.0],
                inference_logprobs=[[1.0] * len(prompt) + [-4.0] * len(c) for c in completions],
                generation_params={"temperature": 0.7},
            )
        )
    return groups


def test_packed_logprobs_equal_one_forward_per_rollout(folder):
    groups = make_groups()
    policy = load_policy(folder, dtype="float32", device="cpu", logprob_chunk=17)
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    (micro,) = pack(groups, normalize_std=True, micro_tokens=10_000).micros
    logprobs, entropy = policy.score(micro)
    expected, expected_entropy = [], []
    for g in groups:
        for tokens, mask in zip(g.tokens, g.masks, strict=True):
            with torch.no_grad():
                table = torch.log_softmax(plain(torch.tensor([tokens])).logits[0] / 0.7, -1)
            for t in range(1, len(tokens)):
                if mask[t] != -100:
                    expected.append(table[t - 1, tokens[t]])
                    expected_entropy.append(-(table[t - 1].exp() * table[t - 1]).sum())
    torch.testing.assert_close(logprobs.detach(), torch.stack(expected), atol=2e-5, rtol=0)
    torch.testing.assert_close(entropy, torch.stack(expected_entropy), atol=2e-5, rtol=0)


def gradient_of(folder, micro_tokens, groups):
    policy = load_policy(folder, dtype="float32", device="cpu", logprob_chunk=50)
    batch = pack(groups, normalize_std=True, micro_tokens=micro_tokens)
    accumulate_gradients(policy, batch, TrainConfig())
    return len(batch.micros), policy.gradients()


def test_the_gradient_does_not_depend_on_how_the_step_is_split(folder):
    groups = make_groups()
    whole, expected = gradient_of(folder, 10_000, groups)
    parts, split = gradient_of(folder, 30, groups)
    assert (whole, parts) == (1, 5)
    for a, b in zip(expected, split, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-4)


def test_tied_embeddings_are_one_parameter_with_one_summed_gradient(folder):
    policy = load_policy(folder, dtype="float32", device="cpu", logprob_chunk=50)
    assert "lm_head.weight" not in policy.masters
    (micro,) = pack(make_groups(1), normalize_std=True, micro_tokens=10_000).micros
    policy.score(micro)[0].sum().backward()
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    total = 0.0
    for g in make_groups(1):
        for tokens, mask in zip(g.tokens, g.masks, strict=True):
            table = torch.log_softmax(plain(torch.tensor([tokens])).logits[0] / 0.7, -1)
            total = total + sum(table[t - 1, tokens[t]] for t in range(1, len(tokens)) if mask[t] != -100)
    total.backward()
    torch.testing.assert_close(
        policy.masters["model.embed_tokens.weight"].grad, plain.model.embed_tokens.weight.grad, atol=2e-4, rtol=1e-3
    )


@pytest.mark.parametrize(("num_root", "prompt_length"), [(0, 0), (0, 5), (3, 4), (4, 0)])
def test_packed_attention_equals_a_masked_softmax_forward_and_backward(num_root, prompt_length):
    torch.manual_seed(0)
    segments, end = [], num_root
    for lengths in ([3, 1, 7], [2, 2]):
        start, end = end, end + prompt_length
        completions = []
        for length in lengths:
            completions.append((end, end + length))
            end += length
        segments.append(Segment((0, num_root), (start, start + prompt_length), tuple(completions)))
    query, key, value = (torch.randn(end, heads, 8, requires_grad=True) for heads in (6, 2, 2))
    upstream = torch.randn(end, 6, 8)
    mask = torch.zeros(end, end, dtype=torch.bool)
    mask[:num_root, :num_root] = torch.ones(num_root, num_root).tril().bool()
    mask[num_root:, :num_root] = True
    for s in segments:
        a, b = s.prompt
        mask[a:b, a:b] = torch.ones(b - a, b - a).tril().bool()
        for c, d in s.completions:
            mask[c:d, a:b] = True
            mask[c:d, c:d] = torch.ones(d - c, d - c).tril().bool()
    rows = [x.transpose(0, 1)[None] for x in (query, key, value)]
    plain = torch.nn.functional.scaled_dot_product_attention(*rows, attn_mask=mask, scale=0.3, enable_gqa=True)
    ours = PackedAttention.apply(query, key, value, lay_out(segments, torch.device("cpu")), 0.3)
    expected = plain[0].transpose(0, 1)
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)
    grads = torch.autograd.grad(ours, (query, key, value), upstream)
    for got, wanted in zip(grads, torch.autograd.grad(expected, (query, key, value), upstream), strict=True):
        torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("chunk", [7, 64, 1000])
def test_chunked_logprobs_equal_log_softmax_forward_and_backward(chunk):
    torch.manual_seed(1)
    hidden, weight = torch.randn(20, 16, requires_grad=True), torch.randn(99, 16, requires_grad=True)
    targets, temperatures = torch.randint(0, 99, (20,)), torch.rand(20) + 0.5
    upstream = torch.randn(20)
    ours, _ = chosen_logprobs(hidden, weight, targets, temperatures, chunk=chunk)
    plain = torch.log_softmax(hidden @ weight.T / temperatures[:, None], -1).gather(1, targets[:, None])[:, 0]
    torch.testing.assert_close(ours, plain, atol=1e-5, rtol=1e-5)
    grads = torch.autograd.grad(ours, (hidden, weight), upstream)
    for got, wanted in zip(grads, torch.autograd.grad(plain, (hidden, weight), upstream), strict=True):
        torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)


def test_logits_of_bf16_states_are_not_rounded_to_bf16():
    torch.manual_seed(2)
    hidden, weight = torch.randn(32, 64).bfloat16(), torch.randn(500, 64).bfloat16()
    targets, ones = torch.randint(0, 500, (32,)), torch.ones(32)
    ours, _ = chosen_logprobs(hidden, weight, targets, ones, chunk=128)
    exact = torch.log_softmax(hidden.double() @ weight.double().T, -1).gather(1, targets[:, None])[:, 0]
    assert (ours.double() - exact).abs().max() < 1e-4


def test_steps_too_small_for_bf16_still_move_the_weights(folder):
    """50 steps of 1e-6 on bf16 weights: the masters move as a plain fp32 AdamW does, and the live weights follow."""
    config = TrainConfig(lr=1e-6, warmup_steps=0, schedule="constant", steps=50, max_grad_norm=1e9)
    policy = load_policy(folder, dtype="bfloat16", device="cpu", logprob_chunk=50)
    before = {n: m.detach().clone() for n, m in policy.masters.items()}
    optimizer = Optimizer(policy, config)
    for step in range(1, 51):
        for g in policy.gradients():
            g.fill_(0.5)
        optimizer.step(step)
    policy.write_live_weights()
    for name, master in policy.masters.items():
        assert (before[name] - master).mean().item() == pytest.approx(50e-6, rel=0.05)
        torch.testing.assert_close(policy.live[name], master.bfloat16(), atol=0, rtol=0)


def test_a_zero_gradient_moves_nothing(folder):
    policy = load_policy(folder, dtype="float32", device="cpu", logprob_chunk=50)
    optimizer = Optimizer(policy, TrainConfig())
    for g in policy.gradients():
        g.fill_(0.1)
    optimizer.step(1)
    moved = {n: m.detach().clone() for n, m in policy.masters.items()}
    norm, _ = optimizer.step(2)
    assert norm == 0
    assert all(torch.equal(moved[n], m) for n, m in policy.masters.items())


def test_clip_gradients_scales_to_the_norm_and_reports_the_old_one():
    grads = [torch.tensor([3.0]), torch.tensor([4.0])]
    assert clip_gradients(grads, 1.0) == pytest.approx(5.0)
    assert torch.cat(grads).tolist() == pytest.approx([0.6, 0.8])


def test_learning_rate_warms_up_and_decays():
    config = TrainConfig(lr=1.0, warmup_steps=2, steps=6, schedule="linear")
    assert [learning_rate(s, config) for s in range(1, 7)] == pytest.approx([0.5, 1.0, 1.0, 0.75, 0.5, 0.25])
