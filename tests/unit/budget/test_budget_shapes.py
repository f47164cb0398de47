"""Parameter counts, against what was published and against transformers itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from treadle.budget.shapes import KNOWN, find_shape, shape_of_size
from treadle.errors import ModelError

PUBLISHED = {
    "SmolLM2-135M": 134_515_008,
    "Qwen3-0.6B": 596_049_920,
    "Qwen3-1.7B": 1_720_574_976,
    "Qwen3-4B": 4_022_468_096,
    "Qwen3-8B": 8_190_735_360,
    "Qwen3-14B": 14_768_307_200,
    "Qwen3-32B": 32_762_123_264,
    "Qwen3-30B-A3B": 30_532_122_624,
    "Qwen2.5-7B": 7_615_616_512,
    "Qwen2.5-72B": 72_706_203_648,
    "Llama-3.2-1B": 1_235_814_400,
    "Llama-3.1-8B": 8_030_261_248,
    "Hermes-3-Llama-3.1-8B": 8_030_261_248,
    "Llama-3.3-70B": 70_553_706_496,
    "Mistral-7B-v0.3": 7_248_023_552,
    "Mistral-Small-24B": 23_572_403_200,
}


@pytest.mark.parametrize(("name", "num_params"), PUBLISHED.items())
def test_known_shapes_have_the_published_number_of_parameters(name: str, num_params: int) -> None:
    assert find_shape(name).num_params == num_params


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "mistral"])
@pytest.mark.parametrize("is_tied", [True, False])
def test_a_config_file_is_counted_as_transformers_counts_it(kind: str, is_tied: bool, tmp_path: Path) -> None:
    from accelerate import init_empty_weights
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"hidden_size": 96, "intermediate_size": 250, "num_hidden_layers": 3, "num_attention_heads": 6}
    config = AutoConfig.for_model(
        kind, **sizes, num_key_value_heads=2, head_dim=24, vocab_size=1003, tie_word_embeddings=is_tied
    )
    config.save_pretrained(tmp_path)
    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(config)
    model.tie_weights()
    shape = find_shape(str(tmp_path))
    assert shape.num_params == sum(p.numel() for p in model.parameters())
    assert shape.num_layer_params == sum(p.numel() for p in model.model.layers[0].parameters())
    assert shape.num_largest == max(p.numel() for p in model.parameters())


def test_a_mixture_of_experts_is_counted_as_transformers_counts_it(tmp_path: Path) -> None:
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    config = Qwen3MoeConfig(
        hidden_size=64, moe_intermediate_size=48, num_experts=6, num_experts_per_tok=2, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, head_dim=24, vocab_size=97,
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(config)
    shape = find_shape(str(tmp_path))
    assert shape.num_params == sum(p.numel() for p in model.parameters())
    assert shape.num_layer_params == sum(p.numel() for p in model.model.layers[0].parameters())
    assert shape.num_largest == max(p.numel() for p in model.parameters())


def test_biases_are_counted_where_a_config_asks_for_them(tmp_path: Path) -> None:
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        hidden_size=64, intermediate_size=160, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=100, attention_bias=True, mlp_bias=True,
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(config)
    assert find_shape(str(tmp_path)).num_params == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ("Qwen/Qwen3-8B", "Qwen3-8B"),
        ("Qwen/Qwen3-4B-Instruct-2507", "Qwen3-4B"),
        ("meta-llama/Meta-Llama-3.1-8B-Instruct", "Llama-3.1-8B"),
        ("NousResearch/Hermes-3-Llama-3.1-8B", "Hermes-3-Llama-3.1-8B"),
        ("mistralai/Mistral-Small-24B-Instruct-2501", "Mistral-Small-24B"),
        ("smollm2-135m-instruct", "SmolLM2-135M"),
    ],
)
def test_names_are_found_as_people_write_them(asked: str, found: str) -> None:
    assert find_shape(asked).name == found


@pytest.mark.parametrize("name", ["Qwen3-9B", "Qwen/Qwen3-8B-FP8", "gpt-5"])
def test_an_unknown_model_is_refused_with_ways_on(name: str) -> None:
    with pytest.raises(ModelError, match="is not known here") as caught:
        find_shape(name)
    assert "--params 24e9" in caught.value.fix


def test_a_near_name_is_suggested() -> None:
    with pytest.raises(ModelError) as caught:
        find_shape("Qwen3-1.8B")
    assert "did you mean 'qwen3-1.7b'?" in caught.value.fix


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "holds no config.json"),
        ("{", "is damaged"),
        (json.dumps({"model_type": "mamba"}), "of type 'mamba'"),
        (json.dumps({"model_type": "llama"}), "does not say 'num_attention_heads'"),
    ],
)
def test_a_folder_that_says_no_shape_is_refused(text: str | None, words: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError, match=words) as caught:
        find_shape(str(tmp_path))
    assert caught.value.fix


@pytest.mark.parametrize("size", [50e6, 1.7e9, 24e9, 405e9])
def test_a_bare_size_gives_a_model_of_exactly_that_size(size: float) -> None:
    shape = shape_of_size(size)
    assert shape.num_params == int(size)
    assert abs(shape.num_other_params) <= max(shape.num_layer_params, shape.num_outer_params)


def test_a_bare_size_of_a_known_model_gives_its_layers() -> None:
    assert shape_of_size(23_572_403_200).num_layers == KNOWN["mistral-small-24b"].num_layers


def test_a_size_that_no_model_has_is_refused() -> None:
    with pytest.raises(ModelError, match="is no size of a model"):
        shape_of_size(24)
