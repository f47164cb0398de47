"""The reference stays the starting model, wherever its weights are kept."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.tiny_model import write_tiny_model
from treadle.config.train import LoraOptions
from treadle.train.lora import adapter_parameters, add_adapters
from treadle.train.reference import Reference, build_reference, offload_to_host

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Row:
    """One plain sequence instead of packed groups: the reference passes its argument to `score`."""

    token_ids_T: Tensor


MICRO = Row(torch.tensor([5, 6, 7, 8, 9, 10, 11]))


def score(model, micro):
    """As the policy does it: the inner model is called, and the output layer's weight is read by itself."""
    hidden_TE = model.base_model(input_ids=micro.token_ids_T[None], use_cache=False).last_hidden_state[0]
    table_TV = torch.log_softmax(hidden_TE[:-1] @ model.get_output_embeddings().weight.T, -1)
    entropy_T = -(table_TV.exp() * table_TV).sum(-1)
    return table_TV.gather(1, micro.token_ids_T[1:, None])[:, 0], entropy_T


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), hidden_size=32)


def load(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture
def untrained(folder):
    with torch.no_grad():
        return score(load(folder), MICRO)[0]


def build(build_copy=None, *, adapted=None, offload=False, score=score):
    return build_reference(score, adapted=adapted, build_copy=build_copy, device=CPU, is_sharded=False, offload=offload)


def train(model, parameters, reference, steps=3):
    """Steps as the trainer takes them: the reference scores between the policy's forward and its backward."""
    optimizer = torch.optim.SGD(parameters, lr=0.5)
    for _ in range(steps):
        logprobs = score(model, MICRO)[0]
        pull = (logprobs - reference(MICRO)).square().mean()
        (pull - logprobs.mean()).backward()
        optimizer.step()
        optimizer.zero_grad()


def test_with_adapters_the_reference_is_the_policy_without_them(folder, untrained):
    torch.manual_seed(0)
    adapted = add_adapters(load(folder), LoraOptions(lora=True, lora_r=4))
    reference = build(adapted=adapted)
    model = adapted.get_base_model()
    train(model, adapter_parameters(adapted).values(), reference)
    trained = score(model, MICRO)[0]
    assert (trained.detach() - untrained).abs().max() > 0.01
    torch.testing.assert_close(reference(MICRO), untrained, atol=0, rtol=0)
    assert not reference(MICRO).requires_grad
    # And the adapters are on again: the policy's logprobs are as before, and still have gradients.
    torch.testing.assert_close(score(model, MICRO)[0], trained, atol=0, rtol=0)
    assert all(p.requires_grad for p in adapter_parameters(adapted).values())


def test_adapters_come_on_again_when_the_reference_fails(folder):
    adapted = add_adapters(load(folder), LoraOptions(lora=True, lora_r=4))

    def out_of_memory(model, micro):
        raise MemoryError

    with pytest.raises(MemoryError):
        build(adapted=adapted, score=out_of_memory)(MICRO)
    assert adapted.get_model_status().enabled is True
    assert all(p.requires_grad for p in adapter_parameters(adapted).values())


@pytest.mark.parametrize("offload", [False, True])
def test_a_copy_does_not_move_with_the_policy_and_gets_no_gradients(folder, untrained, offload):
    policy = load(folder)
    copied = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    reference = build(lambda: copied, offload=offload)
    train(policy, policy.parameters(), reference)
    assert (score(policy, MICRO)[0].detach() - untrained).abs().max() > 0.01
    torch.testing.assert_close(reference(MICRO), untrained, atol=0, rtol=0)
    assert not copied.training
    assert all(p.grad is None and not p.requires_grad for p in copied.parameters())


def test_a_host_copy_loads_one_layer_at_a_time(folder, untrained):
    model = load(folder)
    homes = {name: p.data_ptr() for name, p in model.named_parameters()}
    visits = []

    def away(model):
        return {name for name, p in model.named_parameters() if p.data_ptr() != homes[name]}

    reference = Reference(model, score, offload_to_host(model, CPU).loaded)
    for layer in model.model.layers:
        layer.self_attn.register_forward_hook(lambda *_: visits.append(away(model)))
    torch.testing.assert_close(reference(MICRO), untrained, atol=0, rtol=0)
    outer = {"model.embed_tokens.weight", "model.norm.weight"}
    assert visits == [
        outer | {name for name in homes if name.startswith(f"model.layers.{number}.")} for number in range(3)
    ]
    assert away(model) == set()


def test_a_host_copy_is_back_in_host_memory_after_a_failure(folder, untrained):
    model = load(folder)
    homes = [p.data_ptr() for p in model.parameters()]
    reference = Reference(model, score, offload_to_host(model, CPU).loaded)

    def out_of_memory(*_):
        raise MemoryError

    failing = model.model.layers[1].mlp.register_forward_hook(out_of_memory)
    with pytest.raises(MemoryError):
        reference(MICRO)
    assert [p.data_ptr() for p in model.parameters()] == homes
    failing.remove()
    torch.testing.assert_close(reference(MICRO), untrained, atol=0, rtol=0)
