"""Adapters against PEFT's own arithmetic, and names against the model's own."""

from __future__ import annotations

import copy
import doctest

import pytest
import torch
from peft import PeftModel, get_peft_model_state_dict
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from tests.tiny_model import write_tiny_model
from treadle.config.train import LoraOptions
from treadle.errors import ConfigError
from treadle.train import lora
from treadle.train.lora import (
    ServedAdapter,
    adapter_parameters,
    add_adapters,
    base_name,
    merged_weights,
    original_weights,
    set_dropout,
)

TOKENS = torch.tensor([[5, 6, 7, 8, 9]])
EVERYWHERE = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), hidden_size=32)


def load(folder, dtype=torch.float32):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def adapt(folder, dtype=torch.float32, **options):
    return add_adapters(load(folder, dtype), LoraOptions(lora=True, lora_r=4, lora_alpha=8, **options))


def scramble(adapted):
    """As training would: PEFT begins with B = 0, where an adapter does nothing."""
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in adapter_parameters(adapted).values():
            parameter.copy_(torch.randn_like(parameter) * 0.1)


def hidden(model):
    return model.base_model(input_ids=TOKENS, use_cache=False).last_hidden_state


def test_new_adapters_change_nothing_and_trained_ones_take_effect(folder):
    before = hidden(load(folder))
    adapted = adapt(folder)
    torch.testing.assert_close(hidden(adapted.get_base_model()), before, atol=0, rtol=0)
    scramble(adapted)
    assert (hidden(adapted.get_base_model()) - before).abs().max() > 0.01


def test_the_adapters_alone_are_trained_in_fp32_on_a_bf16_model(folder):
    adapted = adapt(folder, torch.bfloat16)
    hidden(adapted.get_base_model()).float().square().sum().backward()
    trained = adapter_parameters(adapted)
    assert {p.dtype for p in trained.values()} == {torch.float32}
    assert {p.dtype for p in original_weights(adapted).values()} == {torch.bfloat16}
    with_gradient = {id(p) for p in adapted.parameters() if p.grad is not None}
    assert with_gradient == {id(p) for p in trained.values()}
    moved = {name for name, p in trained.items() if p.grad.abs().max() > 0}
    assert moved == {name for name in trained if "lora_B" in name}  # while B is 0, nothing flows to A
    num_layers, width, kv_width = 3, 32, 16
    assert sum(p.numel() for p in trained.values()) == num_layers * 4 * ((width + width) + (width + kv_width))


def test_adapters_work_under_a_replaced_attention(folder):
    calls = []

    def attention(module, query, key, value, attention_mask, *, scaling, **_):
        calls.append(module.layer_idx)
        out = scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
        return out.transpose(1, 2), None

    adapted = adapt(folder)
    scramble(adapted)
    expected = hidden(adapted.get_base_model())
    AttentionInterface.register("test_of_adapters", attention)
    adapted.get_base_model().set_attn_implementation("test_of_adapters")
    torch.testing.assert_close(hidden(adapted.get_base_model()), expected, atol=1e-5, rtol=1e-5)
    assert calls == [0, 1, 2]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 0.0), (torch.bfloat16, 2**-8)])
def test_merged_weights_equal_pefts_own_merge(folder, dtype, tolerance):
    adapted = adapt(folder, dtype, lora_target_modules=EVERYWHERE)
    scramble(adapted)
    before = {name: p.detach().clone() for name, p in original_weights(adapted).items()}
    merged = dict(merged_weights(adapted))
    by_peft = dict(copy.deepcopy(adapted).merge_and_unload().named_parameters())
    assert len(merged) == 3 * len(EVERYWHERE)
    for name, weight in merged.items():
        assert weight.dtype == dtype
        assert not torch.equal(weight, before[name])
        torch.testing.assert_close(weight, by_peft[name], atol=tolerance * 0.1, rtol=tolerance)
    assert all(torch.equal(before[name], p) for name, p in original_weights(adapted).items())


def test_merged_weights_compute_the_same_as_adapters(folder):
    adapted = adapt(folder, lora_target_modules=EVERYWHERE)
    scramble(adapted)
    plain = load(folder)
    weights = {name: p.detach() for name, p in original_weights(adapted).items()} | dict(merged_weights(adapted))
    plain.load_state_dict(weights, strict=False)
    torch.testing.assert_close(hidden(plain), hidden(adapted.get_base_model()), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("alpha", [32, 48])  # a scale that the number formats round, and one that they have
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_served_adapter_equals_an_engines_copy_of_the_saved_one(folder, dtype, alpha):
    adapted = add_adapters(load(folder), LoraOptions(lora=True, lora_r=24, lora_alpha=alpha))
    served = ServedAdapter(adapted, dtype, torch.device("cpu"))
    for _ in range(2):
        scramble(adapted)
        served.refresh()
        assert len(served.named) == len(adapter_parameters(adapted))
        for name, parameter in adapter_parameters(adapted).items():
            expected = parameter.detach().to(dtype)
            if "lora_B" in name:
                expected *= alpha / 24  # as vLLM has it, in place
            assert torch.equal(served.named[base_name(name).removesuffix(".weight")], expected), name
        with torch.no_grad():
            next(iter(adapter_parameters(adapted).values())).add_(1.0)


def test_layers_stored_transposed_are_merged_the_right_way():
    model = GPT2LMHeadModel(GPT2Config(vocab_size=90, n_embd=32, n_layer=2, n_head=2, n_positions=32))
    adapted = add_adapters(model, LoraOptions(lora=True, lora_target_modules=("c_attn",)))
    scramble(adapted)
    by_peft = dict(copy.deepcopy(adapted).merge_and_unload().named_parameters())
    merged = dict(merged_weights(adapted))
    assert sorted(merged) == ["transformer.h.0.attn.c_attn.weight", "transformer.h.1.attn.c_attn.weight"]
    for name, weight in merged.items():
        assert weight.shape == (32, 96)
        torch.testing.assert_close(weight, by_peft[name], atol=0, rtol=0)


def test_names_are_those_of_the_model_and_of_pefts_files(folder, tmp_path):
    adapted = adapt(folder)
    scramble(adapted)
    own = {name: tuple(p.shape) for name, p in load(folder).named_parameters()}
    assert {name: tuple(p.shape) for name, p in original_weights(adapted).items()} == own
    saved = get_peft_model_state_dict(adapted, save_embedding_layers=False)
    ours = adapter_parameters(adapted)
    assert ours.keys() == saved.keys()
    assert all(torch.equal(ours[name], saved[name]) for name in saved)
    adapted.save_pretrained(tmp_path, save_embedding_layers=False)
    loaded = PeftModel.from_pretrained(load(folder), tmp_path)
    expected = hidden(adapted.get_base_model())
    torch.testing.assert_close(hidden(loaded.get_base_model()), expected, atol=1e-6, rtol=1e-6)


def test_adapters_only_in_the_chosen_layers(folder):
    adapted = adapt(folder, train_layer_indices=(0, 2), lora_target_modules=("o_proj",))
    assert sorted(dict(merged_weights(adapted))) == [f"model.layers.{i}.self_attn.o_proj.weight" for i in (0, 2)]


def test_dropout_is_the_adapters_alone_and_can_be_switched(folder):
    adapted = adapt(folder, lora_dropout=0.5)
    scramble(adapted)
    model = adapted.get_base_model()
    assert not any(module.training for module in adapted.modules())
    assert torch.equal(hidden(model), hidden(model))
    set_dropout(adapted, on=True)
    active = {name for name, module in model.named_modules() if module.training}
    assert active
    assert all("lora_dropout" in name for name in active)
    assert not torch.equal(hidden(model), hidden(model))
    set_dropout(adapted, on=False)
    assert not any(module.training for module in adapted.modules())
    assert torch.equal(hidden(model), hidden(model))


@pytest.mark.parametrize(
    ("options", "words", "remedy"),
    [
        ({"lora_target_modules": ("q_proj", "query")}, "no linear layer 'query'; it has down_proj, ", "target-modules"),
        ({"lora_target_modules": ("mlp",)}, "no linear layer 'mlp'", "target-modules"),
        ({"lora_target_modules": ("lm_head",)}, "output layer in chunks", "q_proj"),
        ({"lora_target_modules": ("embed_tokens",)}, "output layer in chunks", "q_proj"),
        ({"lora_target_modules": ()}, "no layer would get an adapter", "target-modules"),
        ({"train_layer_indices": ()}, "no layer would get an adapter", "train-layer-indices"),
        ({"train_layer_indices": (1, 3)}, "no layer 3: the model has 3 layers", "train-layer-indices"),
        (
            {"train_layer_indices": (1,), "lora_target_modules": ("layers.0.self_attn.q_proj",)},
            "none of the chosen layers has a 'layers.0.self_attn.q_proj'; it is in model.layers.0.self_attn.q_proj",
            "train-layer-indices",
        ),
    ],
)
def test_targets_that_cannot_be_are_refused(folder, options, words, remedy):
    with pytest.raises(ConfigError, match=words) as refusal:
        adapt(folder, **options)
    assert remedy in refusal.value.fix


def test_examples_in_docstrings():
    results = doctest.testmod(lora)
    assert (results.attempted > 0, results.failed) == (True, 0)
