from __future__ import annotations

import pytest
import torch

from treadle.train.logprobs import chosen_logprobs


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


def test_a_frozen_output_layer_gets_no_gradient_and_hidden_states_the_same():
    torch.manual_seed(3)
    hidden, weight = torch.randn(20, 16, requires_grad=True), torch.randn(99, 16)
    targets, ones = torch.randint(0, 99, (20,)), torch.ones(20)
    ours, _ = chosen_logprobs(hidden, weight, targets, ones, chunk=10)
    (got,) = torch.autograd.grad(ours.sum(), hidden)
    plain = torch.log_softmax(hidden @ weight.T, -1).gather(1, targets[:, None])
    (wanted,) = torch.autograd.grad(plain.sum(), hidden)
    torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)


def test_the_logits_of_the_whole_vocabulary_never_exist():
    """Every tensor that is made while logprobs go forward and backward is counted, by torch's own dispatcher."""
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    class Largest(TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            made = function(*args, **(kwargs or {}))
            for tensor in tree_leaves(made):
                if isinstance(tensor, torch.Tensor):
                    self.elements = max(self.elements, tensor.numel())
            return made

    num_tokens, size, vocabulary, chunk = 600, 8, 5000, 250
    hidden = torch.randn(num_tokens, size, requires_grad=True)
    weight = torch.randn(vocabulary, size, requires_grad=True)
    targets = torch.randint(0, vocabulary, (num_tokens,))
    with Largest() as seen:
        chosen_logprobs(hidden, weight, targets, torch.ones(num_tokens), chunk=chunk)[0].sum().backward()
    assert seen.elements <= num_tokens * chunk < num_tokens * vocabulary / 10
