"""The trainer's numbers on a GPU against plain torch there. Never run in CI: pytest -m gpu tests/gpu."""

from __future__ import annotations

import functools
import importlib.util
from types import SimpleNamespace

import pytest
import torch

from tests.sample_groups import make_groups
from tests.tiny_model import write_tiny_model
from treadle.config import TrainConfig
from treadle.train import logprobs
from treadle.train.adamw_8bit import AdamW8bit
from treadle.train.attention import attend_varlen, flash4_problem, plan_attention
from treadle.train.loop import accumulate_gradients
from treadle.train.optimizers import build_optimizer
from treadle.train.pack import pack
from treadle.train.policy import load_policy
from treadle.train.ranks import ALONE

kernels = pytest.importorskip("treadle.train.kernels", reason="needs Triton", exc_type=ImportError)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
CUDA = torch.device("cuda")


long_groups = functools.partial(make_groups, 6, prompt_length=(10, 30), completion_length=(1, 60))


def test_fused_softmax_sums_equal_the_plain_ones():
    torch.manual_seed(0)
    logits = torch.randn(300, 5003, device=CUDA) * 5
    inverse, targets = torch.rand(300, device=CUDA) + 0.5, torch.randint(0, 9000, (300,), device=CUDA)
    results = []
    for kind in (kernels, logprobs):
        sums = [torch.full((300,), -torch.inf, device=CUDA), *(torch.zeros(300, device=CUDA) for _ in range(3))]
        for first in (0, 4000):  # two chunks, one of which is no multiple of anything
            part = logits[:, : 4000 if first == 0 else 1003].contiguous()
            kind.add_softmax_sums(part, inverse, targets, first, *sums)
        results.append(sums)
    for fused, plain in zip(*results, strict=True):
        torch.testing.assert_close(fused, plain, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_fused_logit_gradients_equal_the_plain_ones(dtype):
    torch.manual_seed(0)
    logits = torch.randn(300, 5003, device=CUDA)
    inverse, targets = torch.rand(300, device=CUDA) + 0.5, torch.randint(0, 9000, (300,), device=CUDA)
    norms, scales = torch.logsumexp(logits * inverse[:, None], -1), torch.randn(300, device=CUDA)
    fused = kernels.logit_gradients(logits.clone(), inverse, targets, 2000, norms, scales, dtype)
    plain = logprobs.logit_gradients(logits.clone(), inverse, targets, 2000, norms, scales, dtype)
    torch.testing.assert_close(fused, plain, atol=1e-6, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5)


def test_the_adding_kernel_adds():
    total, gradient = torch.randn(1000, 37, device=CUDA), torch.randn(1000, 37, device=CUDA).bfloat16()
    expected = total + gradient.float()
    kernels.add_to_fp32(total, gradient)
    assert torch.equal(total, expected)


def test_the_8bit_kernel_moves_as_its_plain_twin_does():
    """Both round at random, so they agree in the mean: moments over a block, and the motion of 50 tiny steps."""
    torch.manual_seed(0)
    start = {"a": torch.randn(300, 1000) * 0.02, "b": torch.randn(777) * 0.02}
    moved = []
    for has_kernel in (True, False):
        live = {name: torch.nn.Parameter(value.to(CUDA).bfloat16()) for name, value in start.items()}
        policy = SimpleNamespace(live=live, device=CUDA, ranks=ALONE)
        optimizer = AdamW8bit(policy, TrainConfig(optimizer="adamw_8bit", lr=1e-5, warmup_steps=0, schedule="constant"))
        optimizer._has_kernel = has_kernel
        if not has_kernel:
            optimizer._generator = torch.Generator(CUDA).manual_seed(0)
        before = {name: p.detach().float().clone() for name, p in live.items()}
        noise = torch.Generator(CUDA).manual_seed(1)
        for step in range(1, 51):
            for name, gradient in optimizer.gradients.items():
                torch.randn(gradient.shape, generator=noise, device=CUDA, out=gradient)
                gradient.mul_(1e-3).add_(before[name].sign() * 1e-3)
            optimizer.step(step)
            optimizer._write()
        signs = torch.cat([value.sign().flatten() for value in before.values()])
        motion = torch.cat([(p.detach().float() - before[name]).flatten() for name, p in live.items()])
        means = [m.read(slice(None)).flatten()[: before[n].numel()] for n, m in optimizer._means.items()]
        squares = [m.read(slice(None)).flatten()[: before[n].numel()] for n, m in optimizer._squares.items()]
        # along the gradient's direction: across it both only have their own random rounding
        moved.append((-(motion * signs).mean(), (torch.cat(means) * signs).mean(), torch.cat(squares).mean()))
    for fused, plain, name in zip(*moved, ("motion", "mean", "square"), strict=True):
        print(f"{name}: kernel {float(fused):.3e}, plain {float(plain):.3e}")
        assert float(fused) == pytest.approx(float(plain), rel=0.02)
    assert moved[0][0] > 2e-4


needs_flash4 = pytest.mark.skipif(
    flash4_problem(CUDA, 64) is not None, reason="needs flash-attn-4 and a card it is for"
)
KERNELS = ["varlen", pytest.param("flash4", marks=needs_flash4)]


@pytest.mark.parametrize("head_size", [64, 128])
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("share", ["on", "off"])
def test_variable_length_attention_equals_the_cpus(share, kernel, head_size):
    config = TrainConfig(micro_tokens=10_000, share_prompts=share)
    (micro,) = pack(long_groups(), config).micros
    torch.manual_seed(0)
    rows = [torch.randn(len(micro.token_ids_T), heads, head_size).bfloat16() for heads in (4, 2, 2)]
    upstream = torch.randn(len(micro.token_ids_T), 4, head_size).bfloat16()
    scaling = head_size**-0.5
    plain = [x.float().requires_grad_() for x in rows]
    plan = plan_attention(micro.segments, torch.device("cpu"), "sdpa")["plan"]
    expected = plan.attend(*plain, scaling)
    fast = [x.to(CUDA).requires_grad_() for x in rows]
    got = attend_varlen(*fast, scaling, -1, **plan_attention(micro.segments, CUDA, kernel))
    torch.testing.assert_close(got.cpu().float(), expected, atol=2e-2, rtol=2e-2)
    wanted = torch.autograd.grad(expected, plain, upstream.float())
    for a, b in zip(torch.autograd.grad(got, fast, upstream.to(CUDA)), wanted, strict=True):
        torch.testing.assert_close(a.cpu().float(), b, atol=6e-2, rtol=3e-2)


@needs_flash4
@pytest.mark.parametrize("share", ["on", "off"])
def test_a_window_is_the_same_for_both_kernels(share):
    (micro,) = pack(long_groups(), TrainConfig(micro_tokens=10_000, share_prompts=share)).micros
    torch.manual_seed(0)
    rows = [torch.randn(len(micro.token_ids_T), n, 64, device=CUDA, dtype=torch.bfloat16) for n in (4, 2, 2)]
    upstream = torch.randn(len(micro.token_ids_T), 4, 64, device=CUDA, dtype=torch.bfloat16)
    results = []
    for kernel in ("varlen", "flash4"):
        inputs = [x.clone().requires_grad_() for x in rows]
        got = attend_varlen(*inputs, 0.2, 16, **plan_attention(micro.segments, CUDA, kernel))
        results.append([got, *torch.autograd.grad(got, inputs, upstream)])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, atol=6e-2, rtol=3e-2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "model", hidden_size=256)


@functools.cache
def plain_gradient(folder):
    return gradient_of(folder, "cpu")


def gradient_of(folder, device, **changes):
    config = TrainConfig(device=device, dtype="bfloat16", micro_tokens=400).model_copy(update=changes)
    policy = load_policy(folder, config)
    optimizer = build_optimizer(policy, config)
    stats = accumulate_gradients(policy, pack(long_groups(), config), config)
    gradient = torch.cat([g.flatten().float().cpu() for g in optimizer.gradients.values()])
    return gradient, stats.metrics()["loss"]


FORMS = [
    {"compile": "off"},
    {"compile": "on"},
    {"compile": "on", "attention": "varlen"},  # torch's kernel, where FlashAttention 4 is there too
    {"compile": "on", "share_prompts": "off"},
    {"compile": "on", "gradient_checkpointing": True},
    {"optimizer": "adamw_cpu"},
    pytest.param(
        {"fused_kernels": "liger"},  # last: liger changes the model's classes for the whole process
        marks=pytest.mark.skipif(importlib.util.find_spec("liger_kernel") is None, reason="needs liger-kernel"),
    ),
]


def test_a_reference_in_host_memory_scores_as_one_on_the_card(folder):
    config = TrainConfig(device="cuda", dtype="bfloat16", compile="off", micro_tokens=10_000)
    (micro,) = pack(long_groups(), config).micros
    policy = load_policy(folder, config)
    on_card = policy.reference(folder)(micro)
    offloaded = load_policy(folder, config.model_copy(update={"reference_offload": True})).reference(folder)(micro)
    assert torch.equal(on_card, offloaded)
    torch.testing.assert_close(on_card, policy.score(micro)[0].detach(), atol=1e-6, rtol=0)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_every_fast_form_gives_the_gradient_of_the_plain_cpu_run(form, folder):
    """bf16 rounds differently in each: the direction must agree, and the size."""
    expected, loss = plain_gradient(folder)
    got, other_loss = gradient_of(folder, "cuda", **form)
    cosine = torch.nn.functional.cosine_similarity(got, expected, dim=0).item()
    print(f"{form}: cosine {cosine:.5f}, norm ratio {got.norm() / expected.norm():.4f}, loss {other_loss - loss:+.1e}")
    assert cosine > 0.995
    assert abs(got.norm() / expected.norm() - 1) < 0.02
    assert abs(other_loss - loss) < 5e-3
