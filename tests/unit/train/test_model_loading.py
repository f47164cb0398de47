"""Several ranks load the rows that they keep: no rank has the whole model in memory."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM, Qwen3Config

from tests.tiny_model import write_tiny_model
from treadle.errors import ModelError
from treadle.train.model_loading import build_model, read_own_rows
from treadle.train.ranks import ALONE, Ranks

FIRST_OF_TWO = Ranks(0, 2)
UNTIED = Qwen3Config(
    vocab_size=90, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, tie_word_embeddings=False,
)  # fmt: skip


@pytest.fixture(params=["tied llama", "untied qwen3 in two files"])
def folder(request, tmp_path):
    if request.param == "tied llama":
        return write_tiny_model(tmp_path / "model")
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(UNTIED).save_pretrained(tmp_path / "model", max_shard_size="300KB")
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 1
    return tmp_path / "model"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_placeholders_share_the_memory_of_one_weight(folder, dtype):
    model, has_placeholders = build_model(folder, dtype, FIRST_OF_TWO)
    assert has_placeholders
    largest = max(p.numel() for p in model.parameters())
    assert {p.untyped_storage().data_ptr() for p in model.parameters()} == {
        next(model.parameters()).untyped_storage().data_ptr()
    }
    assert next(model.parameters()).untyped_storage().nbytes() == 4 * largest
    assert {p.dtype for p in model.parameters()} == {dtype}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_streamed_weights_are_those_that_transformers_loads(folder, dtype):
    whole, has_placeholders = build_model(folder, dtype, ALONE)
    assert not has_placeholders
    streamed = {name: torch.full_like(p, torch.nan) for name, p in whole.named_parameters()}
    read_own_rows(streamed, folder)
    assert all(torch.equal(streamed[name], p) for name, p in whole.named_parameters())
    empty, _ = build_model(folder, dtype, FIRST_OF_TWO)
    assert [name for name, _ in empty.named_parameters()] == list(streamed)
    for (name, found), (_, wanted) in zip(empty.named_buffers(), whole.named_buffers(), strict=True):
        torch.testing.assert_close(found, wanted, atol=0, rtol=0, msg=name)


def test_files_that_need_a_conversion_are_loaded_whole(tmp_path):
    AutoModel.from_config(UNTIED).save_pretrained(tmp_path / "model")  # without "model." before the names
    model, has_placeholders = build_model(tmp_path / "model", torch.float32, FIRST_OF_TWO)
    assert not has_placeholders
    assert len({p.untyped_storage().data_ptr() for p in model.parameters()}) > 1


def test_a_weight_that_the_files_lack_is_named(tmp_path):
    folder = write_tiny_model(tmp_path / "model")
    with pytest.raises(ModelError, match=r"holds no model\.extra"):
        read_own_rows({"model.extra": torch.ones(2)}, folder)
