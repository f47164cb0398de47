"""Preparing a model: trainable layers, and modules that store less for the backward pass."""

from __future__ import annotations

import copy
import doctest
import logging

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP, Qwen3RMSNorm

from tests.tiny_model import write_tiny_model
from treadle.errors import ConfigError, ModelError
from treadle.train import model_setup
from treadle.train.model_setup import choose_trainable, layer_number, use_recomputing_modules


@pytest.fixture
def model(tmp_path):
    return AutoModelForCausalLM.from_pretrained(write_tiny_model(tmp_path, hidden_size=32), dtype=torch.float32)


def trained_names(model):
    return {name for name, p in model.named_parameters() if p.requires_grad}


def test_only_the_chosen_layers_get_gradients(model):
    num_trained = choose_trainable(model, (1, 2))
    assert num_trained == sum(p.numel() for i in (1, 2) for p in model.model.layers[i].parameters())
    model(torch.tensor([[5, 6, 7]])).logits.sum().backward()
    moved = {name for name, p in model.named_parameters() if p.grad is not None}
    assert moved == trained_names(model)
    assert {name.split(".")[2] for name in moved} == {"1", "2"}


def test_by_default_all_is_trained_and_tied_embeddings_count_once(model):
    choose_trainable(model, (0,))
    num_trained = choose_trainable(model, None)
    assert trained_names(model) == {name for name, _ in model.named_parameters()}
    assert "lm_head.weight" not in trained_names(model)
    assert num_trained == sum(p.numel() for p in model.parameters())


def test_layers_under_another_name_are_found():
    config = GPT2Config(vocab_size=90, n_embd=32, n_layer=2, n_head=2, n_positions=32)
    model = GPT2LMHeadModel(config)
    assert choose_trainable(model, (1,)) == sum(p.numel() for p in model.transformer.h[1].parameters())


def test_numbers_inside_of_a_layer_are_not_layers():
    assert layer_number("model.layers.3.mlp.experts.blocks.7.weight") == 3
    assert layer_number("model.my_layers.3.weight") is None
    assert layer_number("layers.3.weight") == 3


def test_a_layer_that_is_not_there_is_refused(model):
    with pytest.raises(ConfigError, match=r"no layer 3, 9: the model has 3 layers, 0 to 2") as refusal:
        choose_trainable(model, (2, 3, 9))
    assert "--train-layer-indices" in refusal.value.fix


def test_nothing_to_train_is_refused(model):
    with pytest.raises(ConfigError, match="no parameter is left to train"):
        choose_trainable(model, ())


def test_a_model_without_layers_has_none_to_choose():
    with pytest.raises(ModelError, match="no numbered layers"):
        choose_trainable(torch.nn.Linear(2, 2), (0,))


def test_examples_in_docstrings():
    results = doctest.testmod(model_setup)
    assert (results.attempted > 0, results.failed) == (True, 0)


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
    use_recomputing_modules(lean)
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


class RenamedNorm(LlamaRMSNorm):
    """Of a family that nobody listed."""


class ShiftedNorm(LlamaRMSNorm):
    def forward(self, hidden_states):
        return super().forward(hidden_states) + hidden_states * self.weight


class GeluMLP(LlamaMLP):
    def __init__(self, config):
        super().__init__(config)
        self.act_fn = torch.nn.GELU()


def test_a_norm_is_recomputed_by_what_it_computes_others_are_named(caplog):
    own, odd, gelu = RenamedNorm(48), ShiftedNorm(48), GeluMLP(LlamaConfig(**SIZES))
    with caplog.at_level(logging.INFO, "treadle.trainer"):
        use_recomputing_modules(torch.nn.ModuleList([own, odd, gelu]))
    assert ["forward" in vars(module) for module in (own, odd, gelu)] == [True, False, False]
    (record,) = caplog.records
    assert record.treadle_fields["modules"] == "GeluMLP, ShiftedNorm"
