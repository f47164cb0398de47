"""Lean modules against transformers' own: the same bits forward, the same gradient backward, less kept."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import LlamaConfig, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP, Qwen3RMSNorm

from treadle.train.lean import make_lean

SIZES = {"hidden_size": 48, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 4}
MODULES = [
    LlamaRMSNorm(48), Qwen3RMSNorm(48), LlamaMLP(LlamaConfig(**SIZES)), Qwen3MLP(Qwen3Config(**SIZES)),
]  # fmt: skip


def kept_bytes(module, x):
    sizes = {}

    def keep(tensor):
        sizes[tensor.data_ptr()] = tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        module(x)
    return sum(sizes.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("module", MODULES, ids=lambda module: type(module).__name__)
def test_lean_modules_compute_the_same_and_keep_less(module, dtype):
    torch.manual_seed(0)
    plain = copy.deepcopy(module).to(dtype)
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.copy_(torch.randn_like(parameter))
    lean = copy.deepcopy(plain)
    make_lean(lean)
    x = torch.randn(2, 30, 48).to(dtype)
    upstream = torch.randn(2, 30, 48).to(dtype)
    results = []
    for form in (plain, lean):
        given = x.clone().requires_grad_()
        out = form(given)
        gradients = torch.autograd.grad(out, (given, *form.parameters()), upstream)
        results.append((out.detach(), gradients))
    assert torch.equal(results[0][0], results[1][0])
    for wanted, got in zip(results[0][1], results[1][1], strict=True):
        scale = float(wanted.float().abs().max())
        tolerance = 1e-5 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(got.float(), wanted.float(), atol=tolerance * scale, rtol=tolerance)
    assert kept_bytes(lean, x.clone().requires_grad_()) < 0.9 * kept_bytes(plain, x.clone().requires_grad_())
